//! Waiting is not counted as work, whether it spins or sleeps.

use std::time::Duration;

use phalanx_comm::{
    Collectives, CommError, GroupId, Launcher, Options, Streams, Threads, Waiting, run_ranks,
};
use phalanx_sys::thread_cpu_time;

use super::attached::Attached;

/// What one rank computes while the other waits.
const WORK: Duration = Duration::from_millis(100);

/// Who else uses the machine may take a core away at any moment, and then time is counted on the
/// wrong side. That does not happen every time; waiting that counts as work would be seen each time.
const TRIES: usize = 5;

/// How long rank 0 worked, and how long rank 1 worked and waited meanwhile.
fn measure(launcher: &dyn Launcher) -> [Duration; 3] {
    let measured = run_ranks(launcher, |endpoint| {
        endpoint.barrier(GroupId::WORLD)?;
        let (before, start) = (endpoint.busy(), thread_cpu_time());
        while endpoint.rank() == 0 && thread_cpu_time() - start < WORK {
            std::hint::spin_loop();
        }
        endpoint.barrier(GroupId::WORLD)?;
        let after = endpoint.busy();
        let waited = after.waited - before.waited;
        Ok::<_, CommError>((after.busy.saturating_sub(before.busy), waited))
    });
    let [(worked, _), (idle, waited)] = measured.unwrap()[..] else { panic!("two ranks") };
    [worked, idle, waited]
}

/// The rank that computes is busy, the one that waits is not, and knows how long it waited.
fn check(name: &str, launcher: &dyn Launcher) {
    let mut seen = Vec::new();
    for _ in 0..TRIES {
        let [worked, idle, waited] = measure(launcher);
        if worked >= WORK / 2 && waited >= WORK / 2 && idle <= waited / 4 {
            return;
        }
        seen.push([worked, idle, waited]);
    }
    panic!("{name}: worked, idle and waited were {seen:?}");
}

#[test]
fn waiting_is_not_busy() {
    for waiting in [Waiting::Spin, Waiting::Park] {
        let options = Options { waiting, ..Options::default() };
        check(&format!("{waiting:?}"), &Threads { ranks: 2, options: options.clone() });
        check(&format!("shared memory, {waiting:?}"), &Attached { ranks: 2, options });
    }
    check("streams", &Streams::new(2));
}
