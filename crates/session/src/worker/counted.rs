//! What a rank counts, and what its scripts predicted of it.

use std::collections::BTreeMap;

use phalanx_call::traffic::add;
use phalanx_engine::{Counters, Engine};
use phalanx_script::traffic::rows;
use phalanx_script::{Moved, Route, TurnRows, traffic};

use super::RankWorker;
use crate::command::Measured;

impl<E: Engine + Counters> RankWorker<E> {
    /// The rows that the last step's script gets from others, if the engine moves no more than there are.
    fn rows(&self) -> Vec<TurnRows> {
        let counts = self.executor.engine().moves_rows();
        let loaded = self.scripts.get(&self.last).filter(|_| counts);
        loaded.map_or_else(Vec::new, |loaded| rows(self.executor.script(loaded.id)))
    }

    /// What it has counted so far.
    pub fn measure(&mut self) -> Measured {
        let (predicted, rows) = (self.predicted(), self.rows());
        let engine = self.executor.engine_mut();
        Measured {
            moved: engine.moved(),
            predicted,
            rows,
            product_seconds: engine.products().as_secs_f64(),
            scratch_bytes: engine.scratch_bytes(),
            busy_seconds: engine.busy().map(|busy| busy.as_secs_f64()),
        }
    }
}

impl<E: Engine> RankWorker<E> {
    /// What this rank's scripts predicted that it would move, in all runs so far.
    fn predicted(&self) -> BTreeMap<Route, Moved> {
        let mut total = BTreeMap::new();
        for loaded in self.scripts.values() {
            for (route, Moved { calls, bytes }) in traffic(self.executor.script(loaded.id)) {
                let times = loaded.runs;
                add(&mut total, route, Moved { calls: calls * times, bytes: bytes * times });
            }
        }
        total
    }
}
