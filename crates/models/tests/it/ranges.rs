//! Ranges of parameters, however they lie in a file: the right values, and not much more is read than was
//! asked for.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use phalanx_ir::DType;
use phalanx_models::hf::names::{self, HfParam, Storage};
use phalanx_models::hf::{
    GptSpec, KeptKeys, LlamaSpec, MixtralSpec, ModelFolder, ModelSpec, Params, RopeScaling,
    RopeSpec, T5Spec, WeightTensor, Weights, save,
};

use crate::fixtures::scratch;
use crate::params::save_params;

/// Models whose larger tensors are longer than any buffer on the way.
fn specs() -> [ModelSpec; 4] {
    let llama = LlamaSpec {
        layers: 1,
        width: 192,
        heads: 6,
        kv_heads: 2,
        head_dim: 32,
        ffn: 300,
        vocab: 1999,
        context: 64,
        norm_eps: 1e-5,
        rope: RopeSpec { theta: 10_000.0, scaling: RopeScaling::None },
        tied: false,
    };
    let gpt = GptSpec {
        layers: 1,
        width: 336,
        heads: 6,
        ffn: 450,
        vocab: 801,
        context: 20,
        norm_eps: 1e-5,
        tied: true,
    };
    let small = LlamaSpec { vocab: 99, ..llama.clone() };
    let mixtral = MixtralSpec {
        base: LlamaSpec { ffn: 70, ..small },
        experts: 3,
        top_k: 2,
        expert_ffn: 70,
        every: 1,
        shared: 0,
        residual: false,
        normalised: true,
        noisy: false,
        late: None,
    };
    let t5 =
        T5Spec { head_dim: 40, tied: false, scaled: false, ..T5Spec::new(1, 160, 3, 230, 1999) };
    [ModelSpec::Llama(llama), ModelSpec::Gpt(gpt), ModelSpec::Mixtral(mixtral), ModelSpec::T5(t5)]
}

/// Every value of a model differs from its neighbours, in every precision.
fn tensors(spec: &ModelSpec) -> BTreeMap<String, WeightTensor> {
    let tensor = |HfParam { name, shape, .. }: HfParam| {
        let elements: usize = shape.iter().product();
        let offset = name.len();
        let values = (0..elements).map(|i| ((i * 37 + offset) % 8191) as f64 / 3.0 - 900.0);
        (name, WeightTensor::f64(shape, values.collect()))
    };
    names::params(spec).into_iter().map(tensor).collect()
}

fn folder(spec: &ModelSpec, stored: DType) -> PathBuf {
    let kind = match spec {
        ModelSpec::Gpt(_) => "gpt",
        ModelSpec::Llama(_) => "llama",
        ModelSpec::Mixtral(_) => "mixtral",
        ModelSpec::T5(_) => "t5",
    };
    let dir = scratch(&format!("ranges-{kind}-{stored}"));
    save(&dir, spec, &tensors(spec), stored, &KeptKeys::default()).unwrap();
    dir
}

/// What ranks ask for: everything, rows, columns, shards that begin and end within rows, and those of
/// columns.
#[allow(clippy::single_range_in_vec_init, reason = "a list of one range is meant")]
fn asked(shape: &[usize]) -> Vec<Vec<Range<usize>>> {
    let width = shape[shape.len() - 1];
    let elements: usize = shape.iter().product();
    let rows = elements / width;
    let columns = |rows: Range<usize>, cols: Range<usize>| -> Vec<Range<usize>> {
        rows.map(|row| row * width + cols.start..row * width + cols.end).collect()
    };
    let mut within = columns(0..rows.div_ceil(2), width / 2..width);
    within[0].start += 1;
    vec![
        vec![],
        vec![0..elements],
        vec![rows / 3 * width..(rows / 2 + 1) * width],
        vec![elements / 3..elements / 3 + elements / 4],
        vec![elements - 1..elements],
        columns(0..rows, 0..width / 2),
        columns(0..rows, width / 2..width),
        within,
    ]
}

/// Values of the wanted type, by way of the type that the file has.
fn expected(
    tensor: &WeightTensor,
    stored: DType,
    ranges: &[Range<usize>],
    dtype: DType,
) -> Vec<u8> {
    let kept = tensor.to_bytes(0..tensor.len(), stored).unwrap();
    let kept = WeightTensor::from_bytes(tensor.shape.clone(), stored, &kept);
    ranges.iter().flat_map(|range| kept.to_bytes(range.clone(), dtype).unwrap()).collect()
}

#[test]
fn every_range_has_the_values_of_the_whole_in_every_type() {
    for spec in specs() {
        let tensors = tensors(&spec);
        for stored in [DType::F32, DType::F64] {
            let source = ModelFolder::open(&folder(&spec, stored)).unwrap();
            for HfParam { name, shape, .. } in source.params() {
                for ranges in asked(shape) {
                    for dtype in [DType::F64, DType::F32, DType::Bf16, DType::F16] {
                        let found = source.read_ranges(name, &ranges, dtype).unwrap();
                        let expected = expected(&tensors[name], stored, &ranges, dtype);
                        assert!(found == expected, "{name}: {stored} as {dtype}");
                    }
                }
            }
        }
    }
}

/// Exactly the bytes that were asked for; of a transposed tensor, at most two rows of ours more,
/// and of several matrices as much of each.
#[test]
fn a_range_reads_its_own_bytes() {
    let size = 2;
    for spec in specs() {
        let source = ModelFolder::open(&folder(&spec, DType::Bf16)).unwrap();
        assert_eq!(source.bytes_read(), 0, "opening reads headers alone");
        for HfParam { name, shape, storage, .. } in source.params() {
            for ranges in asked(shape) {
                let before = source.bytes_read();
                source.read_ranges(name, &ranges, DType::F32).unwrap();
                let read = (source.bytes_read() - before) as usize;
                let own = size * ranges.iter().map(Range::len).sum::<usize>();
                let most = match storage {
                    Storage::Transposed => own + 2 * size * shape[1],
                    Storage::Matrix { .. } => own + 2 * size * shape[0] * shape[2],
                    Storage::Whole | Storage::Part { .. } => own,
                };
                assert!((own..=most).contains(&read), "{name}: {read} bytes for {own}");
            }
        }
    }
}

#[test]
fn columns_of_a_transposed_tensor_are_read_alone() {
    let source = ModelFolder::open(&folder(&specs()[0], DType::F64)).unwrap();
    let half: Vec<Range<usize>> = (0..192).map(|row| row * 300..row * 300 + 150).collect();
    source.read_ranges("blocks.0.mlp.up", &half, DType::F32).unwrap();
    assert_eq!(source.bytes_read(), 192 * 150 * 8);
}

#[test]
fn a_weight_file_is_read_in_ranges_too() {
    let path = scratch("ranges-params").join("model.safetensors");
    let tensors = tensors(&specs()[0]);
    save_params(&path, &tensors, &BTreeMap::new()).unwrap();
    let params = Params::open(&path).unwrap();
    assert_eq!(params.layouts(), tensors.layouts());
    assert_eq!(params.bytes_read(), 0);
    for (name, tensor) in &tensors {
        for ranges in asked(&tensor.shape) {
            let before = params.bytes_read();
            let found = params.read_ranges(name, &ranges, DType::F32).unwrap();
            assert!(found == expected(tensor, DType::F64, &ranges, DType::F32), "{name}");
            assert_eq!(params.bytes_read() - before, 2 * found.len() as u64);
        }
    }
}

#[test]
fn what_is_not_there_is_refused() {
    let tensors = tensors(&specs()[0]);
    let path = scratch("ranges-refused").join("model.safetensors");
    save_params(&path, &tensors, &BTreeMap::new()).unwrap();
    let params = Params::open(&path).unwrap();
    let source = ModelFolder::open(&folder(&specs()[0], DType::F16)).unwrap();
    for weights in [&params as &dyn Weights, &source, &tensors] {
        let read = |name: &str, range| {
            weights.read_ranges(name, &[0..1, range], DType::F32).unwrap_err().to_string()
        };
        let beyond = read("norm", 190..193);
        assert!(beyond.contains("norm") && beyond.contains("elements 190..193"), "{beyond}");
        assert!(read("head", 192 * 1999..192 * 1999 + 1).contains("383808..383809"));
        assert!(read("nothing", 0..1).contains("`nothing`: found no such parameter"));
    }
}
