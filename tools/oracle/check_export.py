"""Loads exported model folders with `transformers` and compares their logits.

    check_export.py DIR                          loads, and prints the last logits of a fixed input
    check_export.py DIR --oracle CASE            compares with tests/fixtures/CASE/oracle.safetensors
    check_export.py --all ROOT                   compares every ROOT/export-<case> with its fixture

`cargo test -p phalanx-models` leaves such folders in `target/tmp`. Exits 1 when a folder does not
load completely (missing, unexpected or misshaped tensors) or when logits differ.
"""

import argparse
import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

FIXTURES = pathlib.Path(__file__).resolve().parents[2] / "tests" / "fixtures"


def load(folder):
    kind = AutoModelForSeq2SeqLM if getattr(AutoConfig.from_pretrained(folder), "is_encoder_decoder", False) else AutoModelForCausalLM
    model, info = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    problems = {k: v for k, v in info.items() if v}
    if problems:
        sys.exit(f"{folder}: {problems}")
    return model.eval()


def logits(model, ids):
    """Of an encoder and a decoder: the encoder reads the first half of each row, and the decoder gets the other."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return model(ids, use_cache=False).logits
    source = ids.shape[1] // 2
    return model(input_ids=ids[:, :source], decoder_input_ids=ids[:, source:], use_cache=False).logits


@torch.no_grad()
def check(folder, oracle):
    """Whether the logits equal the oracle's to the last bits that a change of kernels may touch."""
    expected = load_file(oracle / "oracle.safetensors")
    found = logits(load(folder), expected["ids"][0].long())
    error = ((found - expected["logits"]).abs().max() / expected["logits"].abs().max()).item()
    print(f"{folder}: logits differ by {error:.1e} (relative)")
    return error < 1e-6


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=pathlib.Path)
    parser.add_argument("--oracle", help="name of a fixture, or a folder with oracle.safetensors")
    parser.add_argument("--all", type=pathlib.Path, help="folder that holds export-<case> folders")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if args.all:
        folders = sorted(args.all.glob("export-*/config.json"))
        folders = [f.parent for f in folders if (FIXTURES / f.parent.name.removeprefix("export-")).is_dir()]
        results = [check(f, FIXTURES / f.name.removeprefix("export-")) for f in folders]
        sys.exit(0 if results and all(results) else "failed")
    if args.folder is None:
        parser.error("name a folder, or use --all")
    if args.oracle:
        sys.exit(0 if check(args.folder, FIXTURES / args.oracle) else "failed")
    with torch.no_grad():
        ids = torch.tensor([[5, 17, 3, 29]])
        print(logits(load(args.folder), ids)[0, -1].tolist())


if __name__ == "__main__":
    main()
