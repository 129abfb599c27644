//! A T5 beside one rank: what every block of its decoder reads goes from stage to stage, its cotangent comes back
//! the same way, and one table is read at the beginning, in the middle and at the end.

use std::collections::BTreeMap;

use phalanx_config::Loaded;
use phalanx_ir::{Builder, DType, Init, Model};
use phalanx_models::Chain;
use phalanx_models::hf::WeightTensor;
use phalanx_pipeline::NamedSchedule;
use phalanx_script::Kind;
use phalanx_session::{
    Field, Models, Parallel, Pipeline, PipelineOrder, Session, Settings, StageSplit, StepData,
    initial,
};
use phalanx_spmd::strategies::{Megatron, Sequence};

use crate::bits::trained;
use crate::support::{agrees, laid, on, settings, shared, t5, try_llama};

fn with(sets: &[&str]) -> Loaded {
    t5(&[&["train.microbatches=4"], sets].concat())
}

#[test]
fn layouts_of_one_stage_do_what_one_rank_does() {
    for sets in [
        &["parallel.dp=2"][..],
        &["parallel.tp=2"],
        &["parallel.tp=4", "parallel.sp=true"],
        &["parallel.dp=2", "parallel.tp=2", "parallel.zero=1", "model.dropout=0.2"],
        &["parallel.dp=2", "parallel.zero=2", "model.tied=false"],
        &["parallel.dp=2", "parallel.zero=3", "train.recompute=full"],
    ] {
        agrees(&format!("{sets:?}"), &with(sets), None);
    }
}

#[test]
fn pipelines_do_what_one_rank_does() {
    for (pp, schedule, more) in [
        (2, "1f1b", &[][..]),
        (2, "gpipe", &["parallel.dp=2", "parallel.zero=2"]),
        (2, "zb-h1", &["parallel.tp=2", "parallel.sp=true"]),
        (2, "interleaved", &["model.tied=false", "model.dropout=0.2"]),
        (2, "zb-v", &["parallel.dp=2", "parallel.zero=3"]),
        (2, "chimera", &["train.recompute=full"]),
        (3, "1f1b", &["train.recompute=stage"]),
        (3, "zb-h2", &["parallel.dp=2", "parallel.zero=1"]),
        (4, "1f1b", &["train.recompute=stage", "parallel.tp=2"]),
        (4, "dualpipe", &[]),
        (4, "bpipe", &["train.recompute=selective"]),
        (2, "breadth-first", &["train.recompute=stage"]),
        (2, "v-half", &["parallel.tp=2"]),
        (2, "pipedream-2bw", &["optim.clip=none"]),
    ] {
        let (pp, schedule) = (format!("parallel.pp={pp}"), format!("parallel.schedule={schedule}"));
        let sets = [&[&*pp, &*schedule], more].concat();
        agrees(&format!("{sets:?}"), &with(&sets), None);
    }
}

/// Three stages of three shapes. Each reads the table of words, and two of them one of the tables of distances.
#[test]
fn stages_of_different_shapes_do_what_one_rank_does() {
    for sequence in [false, true] {
        let mut strategies = vec![shared(Megatron::default())];
        strategies.extend(sequence.then(|| shared(Sequence::default())));
        let meshes = ["tp=2", "tp=1", "tp=4"].map(|mesh| mesh.parse().unwrap()).to_vec();
        let order = PipelineOrder::Named(NamedSchedule::OneFOneB);
        let split = StageSplit::Costs(vec![1.0; 7]);
        let pipeline = Pipeline { order, meshes, split, ..Pipeline::default() };
        let parallel = Parallel { strategies, pipeline, ..Parallel::default() };
        // Embedding and encoder; the beginning of the decoder and a block; another block and the head.
        agrees(&format!("{sequence}"), &with(&[]), Some(parallel));
    }
}

/// Each share of a cotangent is added where and when one rank adds it: gradients of weights that one stage has are
/// those of one rank, bit by bit, also where a stage group has the value several times.
#[test]
fn gradients_have_the_bits_of_one_rank() {
    let gradients = |sets: &[&str]| -> BTreeMap<String, Vec<u64>> {
        let loaded = with(&[&["precision.compute=f32", "optim.clip=none"], sets].concat());
        let found = trained(&loaded, None, 1).gradients().unwrap().into_iter();
        let own = found.filter(|(name, _)| name != "embed" && !name.ends_with(".bias"));
        own.map(|(name, own)| (name, own.to_f64().iter().map(|v| v.to_bits()).collect())).collect()
    };
    let alone = gradients(&["model.layers=4"]);
    assert!(alone.len() > 70, "{}", alone.len());
    for (schedule, pp) in [
        ("1f1b", "2"),
        ("1f1b", "4"),
        ("interleaved", "2"),
        ("interleaved", "4"),
        ("zb-h1", "3"),
        ("zb-v", "2"),
        ("v-half", "3"),
    ] {
        let sets = [
            format!("parallel.schedule={schedule}"),
            format!("parallel.pp={pp}"),
            "model.layers=4".into(),
        ];
        let found = gradients(&sets.each_ref().map(|set| &**set));
        for (name, own) in &alone {
            assert!(found[name] == *own, "{schedule}, pp {pp}: {name}");
        }
    }
}

/// Per micro-batch the encoder's result crosses once into each later stage that reads it, and its cotangent back.
#[test]
fn the_encoders_result_goes_from_stage_to_stage() {
    let loaded = with(&["model.layers=4", "parallel.pp=4"]);
    let laid = laid(&loaded, None);
    let mut sent = BTreeMap::new();
    for rank in 0..4 {
        let script = laid.lowered.plan(rank).unwrap().script;
        for action in &script.actions {
            if let Kind::Send { messages, .. } = &action.kind {
                let name = messages[0].value.port.to_string();
                *sent.entry((name, rank, messages[0].peer)).or_insert(0) += 1;
            }
        }
    }
    let memory: Vec<_> = sent.iter().filter(|((name, ..), _)| name.contains("memory")).collect();
    // The decoder is on the last three stages or two: one way there, one way back for each step between them.
    assert!(memory.len() >= 2 && memory.len() % 2 == 0, "{sent:?}");
    for ((_, from, to), count) in &memory {
        assert_eq!((from.abs_diff(*to), **count), (1, 4), "{sent:?}");
    }
}

#[test]
fn what_it_cannot_do_is_refused() {
    for (sets, words) in [
        (
            &["model.kind=t5", "model.kv_heads=4", "model.attention=flash"][..],
            "does not work with model.kind = t5",
        ),
        (&["model.kind=t5"], "t5 has no grouped-query attention"),
        (
            &["model.kind=t5", "model.kv_heads=4", "parallel.cp=2"],
            "parallel.cp = 2 does not work with model.kind = t5",
        ),
        (
            &["model.kind=t5", "model.kv_heads=4", "parallel.tp=4", "parallel.tp_kind=2d"],
            "does not work with model.kind = t5",
        ),
        (
            &["model.kind=t5", "model.kv_heads=4", "parallel.pp=2", "parallel.schedule=pipedream"],
            "model.kind = t5",
        ),
    ] {
        let told = try_llama(sets).unwrap_err().to_string();
        assert!(told.contains(words), "{sets:?}: {told}");
    }
}

/// Values that are read far behind where they are made, by several instances with others between them.
fn with_skips() -> Model {
    let rows = 4;
    let mut chain = Chain::new("skips");
    let init = |_: &str| Init::Normal(0.5);
    let first = Builder::new("first", DType::F64);
    let x = first.data("x", DType::F32, [rows, 3]).cast(DType::F64);
    let h = x.matmul(first.param("w", [3, 4]));
    first.output("h", h);
    first.output("skip", h.tanh());
    chain.under("first", first, init).unwrap();
    let plain = || {
        let b = Builder::new("plain", DType::F64);
        let h = b.boundary("h", [rows, 4]);
        b.output("h", h.matmul(b.param("w", [4, 4])).tanh());
        b
    };
    let reader = || {
        let b = Builder::new("reader", DType::F64);
        let (h, skip) = (b.boundary("h", [rows, 4]), b.boundary("skip", [rows, 4]));
        let sum = h.matmul(b.param("w", [4, 4])) + skip.matmul(b.param("u", [4, 4]));
        b.output("h", sum.tanh());
        b
    };
    chain.under("plain.0", plain(), init).unwrap();
    let giver = Builder::new("giver", DType::F64);
    let h = giver.boundary("h", [rows, 4]);
    giver.output("late", h.matmul(giver.param("v", [4, 4])));
    giver.output("h", h.matmul(giver.param("w", [4, 4])).tanh());
    chain.under("giver", giver, init).unwrap();
    chain.under("reader.0", reader(), init).unwrap();
    chain.under("plain.1", plain(), init).unwrap();
    chain.under("reader.1", reader(), init).unwrap();
    let head = Builder::new("head", DType::F64);
    let [h, skip, late] = ["h", "skip", "late"].map(|name| head.boundary(name, [rows, 4]));
    let y = (h + skip * late).matmul(head.param("w", [4, 2]));
    let target = head.data("y", DType::F32, [rows, 2]).cast(DType::F64);
    head.loss("loss", y.squared_error(target) * head.scalar("inv_tokens"));
    chain.under("head", head, init).unwrap();
    chain.finish()
}

/// Skip connections between stages: the bits of one rank, whatever the schedule.
#[test]
fn skip_connections_have_the_bits_of_one_rank() {
    let models = Models::trained(with_skips());
    let (xs, ys): (Vec<f32>, Vec<f32>) = (
        (0..48).map(|i| (i % 11) as f32 / 7.0).collect(),
        (0..32).map(|i| (i % 5) as f32).collect(),
    );
    let fields = [("x", Field::F32(&xs)), ("y", Field::F32(&ys))];
    let data = StepData { fields: &fields, count: 32, first_sample: 0, scalars: &[] };
    let trained = |parallel: Parallel| {
        let usual = settings(&t5(&["train.microbatches=4", "optim.clip=none"]), None);
        let settings = Settings { parallel, ..usual };
        let mut session = Session::new(&models, settings, &initial(3)).unwrap();
        let losses: Vec<f64> = (0..3).map(|_| session.step(&data, 0.1).unwrap().loss).collect();
        let bits = |own: WeightTensor| own.to_f64().iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let params = session.params().unwrap().into_iter().map(|(name, own)| (name, bits(own)));
        (losses, params.collect::<BTreeMap<_, _>>())
    };
    let (losses, alone) = trained(Parallel::default());
    assert!(losses[2] < losses[0], "{losses:?}");
    for (mesh, named) in [
        ("pp=2", NamedSchedule::OneFOneB),
        ("pp=3", NamedSchedule::OneFOneB),
        ("pp=4", NamedSchedule::ZbH1),
        ("pp=7", NamedSchedule::OneFOneB),
        ("pp=2", NamedSchedule::Interleaved),
        ("pp=2", NamedSchedule::ZbV),
        ("pp=3", NamedSchedule::VHalf),
        ("pp=2", NamedSchedule::BreadthFirst),
        ("pp=3", NamedSchedule::GPipe),
    ] {
        let pipeline = Pipeline { order: named.into(), ..Pipeline::default() };
        let (_, found) = trained(Parallel { pipeline, ..on(mesh, []) });
        for (name, own) in &alone {
            assert!(found[name] == *own, "{mesh}, {named}: {name}");
        }
    }
}
