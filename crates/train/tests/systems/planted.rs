//! Prediction and measurement are independent: 64 bytes more than needed, and verify is red.

use phalanx_comm::{OpKind, Options};
use phalanx_inspect::verify::{verify, verify_with};
use phalanx_script::{Kind, Script};
use phalanx_session::host::threads_with;

use crate::support::{laid, llama};

#[test]
fn an_extra_copy_is_seen_in_every_kind_of_collective() {
    let mut kinds = Vec::new();
    for sets in [
        ["parallel.dp=2", "parallel.zero=3", "parallel.tp=2", "parallel.sp=true"],
        ["parallel.dp=2", "parallel.cp=2", "parallel.cp_kind=ulysses", "parallel.zero=0"],
    ] {
        let loaded = llama(&sets);
        let clean = verify(&loaded, 1).unwrap();
        assert!(clean.ok, "{clean:#?}");
        for kind in OpKind::ALL {
            if !clean.comm.iter().any(|row| row.op == kind.name() && row.bytes_measured > 0) {
                continue;
            }
            let options = Options { planted_copy: Some(kind), ..Options::default() };
            let found = verify_with(&loaded, 1, &*threads_with(options)).unwrap();
            assert!(!found.ok, "{kind} with a planted copy: {found:#?}");
            // The numbers are right all the same; it is the bytes that differ.
            assert!(found.param_max_rel <= 1e-10);
            let differs = |op: &str| {
                found.comm.iter().any(|r| r.op == op && r.bytes_predicted != r.bytes_measured)
            };
            assert!(differs(kind.name()), "{kind}: {found:#?}");
            kinds.push(kind);
        }
    }
    for kind in [OpKind::AllGather, OpKind::ReduceScatter, OpKind::AllReduce, OpKind::AllToAll] {
        assert!(kinds.contains(&kind), "{kind} was not tried: {kinds:?}");
    }
}

/// Of rows that travel, the prediction is evaluated with the counts of one rank. No step lacks room: what ranks move in such
/// a step is not compared.
#[test]
fn an_extra_copy_is_seen_among_rows() {
    for room in [&["model.capacity=0", "parallel.expert_slack=0"][..], &["model.capacity=1"]] {
        let own = ["model.experts=4", "model.expert_ffn=6", "parallel.dp=2", "parallel.ep=2"];
        let loaded = llama(&[&own[..], &["parallel.expert_exchange=all-to-all"], room].concat());
        let planted_copy = Some(OpKind::AllToAllRagged);
        let options = Options { planted_copy, ..Options::default() };
        let found = verify_with(&loaded, 1, &*threads_with(options)).unwrap();
        let differs =
            |r: &&phalanx_inspect::verify::CommRow| r.bytes_predicted + 64 <= r.bytes_measured;
        let rows = found.comm.iter().filter(|r| r.op == "all_to_all");
        assert!(!found.ok && rows.filter(differs).count() == 1, "{found:#?}");
    }
}

/// A stage that two groups hold: if one of them does not take part in a sum, its update would use half of a gradient, and
/// the replicas would drift apart.
#[test]
fn a_replica_that_is_not_summed_is_found() {
    for schedule in ["chimera", "dualpipe"] {
        let order = format!("parallel.schedule={schedule}");
        let sets = ["parallel.pp=2", "train.microbatches=4", "model.layers=4", &order];
        let lowered = laid(&llama(&sets), None).lowered;
        let scripts: Vec<Script> = (0..2).map(|rank| lowered.plan(rank).unwrap().script).collect();
        phalanx_script::check_together(&scripts).unwrap();
        let sums = |script: &Script| -> Vec<usize> {
            let all = script.actions.iter().enumerate();
            all.filter(|(_, a)| matches!(a.kind, Kind::Reduce { .. })).map(|(at, _)| at).collect()
        };
        for at in sums(&scripts[0]) {
            let alone = without(&scripts[0], at);
            let said = phalanx_script::check(&alone).unwrap_err().to_string();
            assert!(said.contains("is still a partial sum"), "{schedule}: {said}");
            // Nor may the others go on without it.
            let found = phalanx_script::check_together(&[alone, scripts[1].clone()]);
            assert!(found.is_err(), "{schedule}");
        }
        assert!(!sums(&scripts[0]).is_empty(), "{schedule}");
    }
}

/// The script without one of its actions.
pub(crate) fn without(script: &Script, at: usize) -> Script {
    let mut left = script.clone();
    left.actions.remove(at);
    let moved = |index: usize| if index > at { index - 1 } else { index };
    left.turns.iter_mut().for_each(|(index, _)| *index = moved(*index));
    for action in &mut left.actions {
        action.after.retain(|before| *before != at);
        action.after.iter_mut().for_each(|before| *before = moved(*before));
    }
    left
}
