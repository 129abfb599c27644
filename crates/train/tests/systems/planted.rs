//! Prediction and measurement are independent: 64 bytes more than needed, and verify is red.

use phalanx_comm::{OpKind, Options};
use phalanx_inspect::verify::{verify, verify_with};
use phalanx_session::host::threads_with;

use crate::support::llama;

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
