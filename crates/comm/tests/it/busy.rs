//! Waiting is not counted as work, whether it spins or sleeps.

use std::time::{Duration, Instant};

use phalanx_comm::{Collectives, CommError, GroupId, Options, Threads, Waiting, run_ranks};

#[test]
fn waiting_is_not_busy() {
    for waiting in [Waiting::Spin, Waiting::Park] {
        let options = Options { waiting, ..Options::default() };
        let busy = run_ranks(&Threads { ranks: 2, options }, |endpoint| {
            endpoint.barrier(GroupId::WORLD)?;
            let before = endpoint.busy();
            if endpoint.rank() == 0 {
                let start = Instant::now();
                while start.elapsed() < Duration::from_millis(200) {
                    std::hint::spin_loop();
                }
            }
            endpoint.barrier(GroupId::WORLD)?;
            let after = endpoint.busy();
            let waited = after.waited - before.waited;
            Ok::<_, CommError>((after.busy.saturating_sub(before.busy), waited))
        })
        .unwrap();
        let [(worked, _), (idle, waited)] = busy[..] else { panic!("two ranks") };
        assert!(waited >= Duration::from_millis(150), "{waiting:?}: {waited:?}");
        assert!(idle <= Duration::from_millis(20), "{waiting:?}: {idle:?}");
        // How much of the 200 ms the working rank got depends on who else uses the machine.
        assert!(worked >= Duration::from_millis(10), "{waiting:?}: {worked:?}");
    }
}
