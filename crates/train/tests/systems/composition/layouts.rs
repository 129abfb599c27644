//! The configuration and the strategies of a combination.

use phalanx_config::Loaded;
use phalanx_error::Result;
use phalanx_session::{Parallel, SharedStrategy, channels_plan, heights_plan};
use phalanx_spmd::strategies::{
    AllGatherKv, BatchParallel, Cube, DataParallel, Ddp, ExpertExchange, ExpertParallel, Fsdp,
    Gspmd, Megatron, Optimus, Ring, RingSelfAttention, Sequence, TensorPlan, Ulysses,
    WeightUpdateSharding, Zero,
};

use super::{APART, SHAPES, System, TENSOR, pipeline};
use crate::support::{on, shared, try_cnn, try_gpt, try_llama, try_t5};
use System as S;

/// The configuration; a refusal is an answer.
pub(super) fn configuration(systems: &[System]) -> Result<Loaded> {
    let has = |system| systems.contains(&system);
    let batch = samples(systems).map(|count| format!("train.batch_size={count}"));
    // Images have no initial deviation: that network starts as PyTorch's.
    let mut sets = if has(S::Images) { vec![] } else { vec!["model.init_std=0.1"] };
    if has(S::Blocks) && !streams(systems) {
        // Says why.
        sets.push("parallel.stream=true");
    }
    if has(S::Selective) {
        // There is nothing to make again where nothing quadratic is kept.
        sets.extend(["train.recompute=selective", "model.attention=materialised"]);
    }
    if has(S::Rsa) && !has(S::Selective) {
        sets.push("model.attention=materialised");
    }
    if has(S::Full) {
        sets.push("train.recompute=full");
    }
    // A pipeline has two micro-batches anyhow, and then twice as many; one that parks some has twice as many again.
    match (has(S::Microbatches), pipeline(systems).is_some()) {
        (true, true) if has(S::BPipe) => {
            sets.extend(["train.microbatches=8", "train.batch_size=32"])
        }
        (false, false) => {}
        (more, true) if more || has(S::BPipe) => {
            sets.extend(["train.microbatches=4", "train.batch_size=16"]);
        }
        _ => sets.push("train.microbatches=2"),
    }
    sets.extend(batch.as_deref());
    // An encoder and a decoder of two layers are four blocks.
    if pipeline(systems).is_some() && !has(S::Images) && !has(S::T5) {
        sets.push("model.layers=4");
    }
    if has(S::Bf16) {
        sets.extend(["precision.compute=bf16", "precision.weights=bf16", "precision.grads=f32"]);
    }
    if has(S::Half) {
        sets.extend(["precision.compute=f16", "precision.weights=f16", "precision.grads=f32"]);
    }
    if has(S::Lamb) {
        sets.push("optim.kind=lamb");
    }
    if has(S::Adafactor) {
        sets.push("optim.kind=adafactor");
        // The gradient of GPT-2's key bias is zero but for rounding, which makes no steps then.
        sets.extend(has(S::Gpt2).then_some("optim.eps=1e-12"));
    }
    if let Some(how) = APART.into_iter().find(|how| has(*how)) {
        // Of the two steps, the second ends with an average.
        sets.extend(["parallel.dp=2", "parallel.sync_every=2"]);
        sets.push(match how {
            S::Average => "parallel.sync=average",
            _ => "parallel.sync=local-sgd",
        });
    }
    if has(S::Experts) {
        // The second of two layers has experts, and some tokens find no place. Rounded to 16 bits, some
        // would choose another expert: there they take all.
        sets.extend(["model.experts=4", "model.expert_ffn=6", "model.moe_every=2"]);
        sets.extend(match has(S::Bf16) || has(S::Half) {
            false => ["model.capacity=0.75", "model.group=4"],
            true => ["model.capacity=1.0", "model.top_k=4"],
        });
    }
    if has(S::Experts) && APART.into_iter().any(has) {
        sets.push("parallel.ep=2");
    }
    // What is dropped depends on the global place of an element, not on the rank.
    let dropping = || [&sets[..], &["model.dropout=0.1"]].concat();
    match (has(S::Gpt2), has(S::T5), has(S::Images)) {
        (true, ..) => try_gpt(&dropping()),
        (_, true, _) => try_t5(&dropping()),
        (_, _, true) => try_cnn(&sets),
        _ => try_llama(&sets),
    }
}

/// The samples of a step, where they are not as many as for one language model.
fn samples(systems: &[System]) -> Option<usize> {
    let has = |system| systems.contains(&system);
    let shaped = SHAPES.iter().any(|(shape, _)| has(*shape));
    if has(S::Images) {
        // Images are large: as few as all ranks need.
        let more = [S::Microbatches, S::BPipe].into_iter().filter(|system| has(*system)).count();
        let microbatches = if pipeline(systems).is_some() { 2 << more } else { 1 << more };
        let replicas = if has(S::Hybrid) { 4 } else { 2 };
        return Some(replicas * microbatches * if shaped { 4 } else { 1 });
    }
    // Every rank of a square or cube gets samples of each micro-batch.
    shaped.then(|| match (has(S::Microbatches), has(S::BPipe)) {
        (true, true) => 128,
        (false, false) => 32,
        _ => 64,
    })
}

/// Whether something gathers operands of products, which can come block by block.
fn streams(systems: &[System]) -> bool {
    let shape = SHAPES.iter().any(|(shape, _)| systems.contains(shape));
    shape || systems.contains(&S::Sequence)
}

/// The strategies on their mesh, of at most eight ranks in a stage.
pub(super) fn layout(systems: &[System]) -> Parallel {
    let has = |system| systems.contains(&system);
    let stream = has(S::Blocks);
    let shape = SHAPES.into_iter().find(|(system, _)| has(*system));
    let tensor = shape.is_some() || TENSOR.into_iter().any(has);
    let both = has(S::Ulysses) && has(S::AllGatherKv);
    let context = has(S::Ulysses) || has(S::AllGatherKv) || has(S::Ring) || has(S::Rsa);
    // Copies between groups and shards within; where ranks are few the groups are those of context
    // parallelism.
    let crowded = context && (tensor || both);
    let mut axes = Vec::new();
    // From four stages on there is something to park.
    axes.extend(pipeline(systems).map(|_| if has(S::BPipe) { "pp=4" } else { "pp=2" }));
    let shares = systems.iter().any(|s| s.shares());
    if shares || has(S::Experts) {
        // Where ranks are few, no two of them have the same experts.
        let several = has(S::Hybrid) || has(S::Experts) && !context && !tensor;
        axes.push(if several && !crowded { "dp=4" } else { "dp=2" });
    }
    axes.extend((APART.into_iter().any(has) && !has(S::Experts)).then_some("dp=2"));
    axes.extend(context.then_some("cp=2"));
    axes.extend(both.then_some("kv=2"));
    axes.extend(shape.map(|(_, ranks)| ranks).or(tensor.then_some("tp=2")));
    let mut strategies: Vec<SharedStrategy> = Vec::new();
    for system in systems {
        strategies.extend(match system {
            S::Ddp => Some(shared(Ddp::default())),
            S::Owner => Some(shared(DataParallel::default())),
            S::Zero1 => Some(shared(Zero::stage(1))),
            S::Zero2 => Some(shared(Zero::stage(2))),
            S::Zero3 => Some(shared(Zero::stage(3))),
            S::Fsdp => Some(shared(Fsdp::default())),
            S::Hybrid => {
                let shard = Some(if crowded { 1 } else { 2 });
                Some(shared(Fsdp { shard, ..Fsdp::default() }))
            }
            S::Update => Some(shared(WeightUpdateSharding::default())),
            // Heads are divided among one side of a square or cube.
            S::Ulysses => {
                let alike = if has(S::Square) || has(S::Grid) { 2 } else { 4 };
                let alike = if shape.is_some() { alike } else { 1 };
                Some(shared(Ulysses { alike, ..Ulysses::default() }))
            }
            S::Ring => Some(shared(Ring::default())),
            S::Rsa => Some(shared(RingSelfAttention::default())),
            S::Square => Some(shared(Optimus { stream, ..Optimus::default() })),
            S::Squares => Some(shared(Optimus { depth: 2, stream, ..Optimus::default() })),
            S::Cube => Some(shared(Cube { stream, ..Cube::default() })),
            S::Grid => Some(shared(Gspmd { stream, ..Gspmd::default() })),
            S::AllGatherKv => {
                let axis = if both { "kv" } else { "cp" }.to_owned();
                Some(shared(AllGatherKv { axis, ..AllGatherKv::default() }))
            }
            _ => None,
        });
    }
    if has(S::Experts) {
        strategies.extend((!shares).then(|| shared(BatchParallel::default())));
        let exchange = ExpertExchange::AllToAll;
        strategies.push(shared(ExpertParallel { exchange, ..ExpertParallel::over(2) }));
    }
    strategies.extend((tensor && shape.is_none()).then(|| line(systems)));
    if has(S::Sequence) {
        strategies.push(shared(Sequence { stream, ..Sequence::default() }));
    }
    if axes.is_empty() {
        return Parallel::default();
    }
    let pipeline = pipeline(systems).unwrap_or_default();
    Parallel { pipeline, ..on(&axes.join(" "), strategies) }
}

/// How a line of ranks divides the weights of a model.
fn line(systems: &[System]) -> SharedStrategy {
    let has = |system| systems.contains(&system);
    match (has(S::Plan), has(S::Images)) {
        // Only a part of the model: names decide, not what Megatron would find.
        (true, false) => shared(TensorPlan::new("tp").rows("mlp.down").columns("mlp.*")),
        (true, true) => shared(TensorPlan::new("tp").rows("fc2.weight").columns("fc1.*")),
        (false, true) if has(S::Sequence) => shared(heights_plan()),
        (false, true) => shared(channels_plan()),
        _ => shared(Megatron::default()),
    }
}
