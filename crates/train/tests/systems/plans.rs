//! What planners of pipelines find, as settings that run.

use crate::support::{agrees, llama_sources};

/// Planners' results are settings: they verify, on as many ranks as there are at most.
#[test]
fn what_is_planned_runs() {
    let mut uneven = 0;
    for (planner, more) in [
        ("pipedream", &[][..]),
        ("dapple", &[]),
        ("dapple", &["model.vocab=400"]),
        ("pipedream", &["model.vocab=400"]),
        ("2bw", &["run.memory_limit=1GiB"]),
        // Planners place groups of two ranks.
        ("pipedream", &["parallel.tp=2"]),
        ("dapple", &["parallel.cp=2", "model.vocab=400"]),
    ] {
        let plan = format!("parallel.plan={planner}");
        let parts = if planner == "2bw" { &[][..] } else { &["train.microbatches=4"] };
        let sets = ["model.layers=3", "optim.clip=none", "parallel.pp=2", "parallel.dp=2", &plan];
        let sets = [&sets[..], &["train.batch_size=16"], parts, more].concat();
        let sources = llama_sources(&sets);
        let own = phalanx_session::network::load(&sources).unwrap();
        let parallel = &own.config.parallel;
        let group = parallel.tp.get() * parallel.cp.get();
        assert!(parallel.ranks().get() <= 4 * group, "{parallel:?}");
        assert!(
            own.notes.iter().any(|note| note.starts_with("parallel.plan = ")),
            "{:?}",
            own.notes
        );
        uneven += usize::from(parallel.holders.0.iter().any(|count| *count > 1));
        agrees(&format!("{planner}, {more:?}: {:?}", own.notes), &own, None);
    }
    assert!(uneven > 0, "a plan has a stage of several devices");
}
