//! Rules that decide between steps where experts and tokens meet.

use phalanx_error::Problem;

use super::Config;
use super::experts::ExchangeKind;
use super::parallel::{LayoutKind, ParallelConfig};
use super::setting::choice;
use super::values::Values;

choice! {
    /// What decides between steps where experts and tokens meet.
    pub enum PolicyKind {
        /// Nothing.
        Static = "static",
        /// What moves less, by the choices of the step before (Tutel).
        Tutel = "tutel",
        /// Busy experts are shadowed on all ranks (FasterMoE).
        FasterMoe = "fastermoe" later,
        /// Experts are copied and moved (FlexMoE).
        FlexMoe = "flexmoe" later,
    }
}

impl ParallelConfig {
    /// Rejects rules that would have nothing to decide, or whose choices ranks cannot follow.
    pub(crate) fn check_policy(&self, dropless: bool, values: &mut Values) {
        const POLICY: &str = "parallel.expert_policy";
        let name = self.expert_policy.name();
        let is_static = self.expert_policy == PolicyKind::Static;
        let built = is_static || self.expert_policy == PolicyKind::Tutel;
        values.rule(&[POLICY], built, || {
            Problem::new(format!("{POLICY} = \"{name}\" is not built yet"))
                .fix(format!("{POLICY} = \"tutel\" or \"static\""))
        });
        if is_static || !built {
            return;
        }
        let ep = self.ep.get();
        values.rule(&[POLICY, "parallel.ep"], ep > 1, || {
            Problem::new(format!("{POLICY} = \"{name}\" has no effect with parallel.ep = 1"))
                .because("every rank has all experts")
                .fix(format!("parallel.ep = 2, or leave {POLICY} out"))
        });
        values.rule(&[POLICY, "model.capacity"], dropless, || {
            Problem::new(format!("{POLICY} = \"{name}\" has no effect unless model.capacity = 0"))
                .because("no expert gets more rows than it has places, so the same layout is nearly always the better one")
                .fix("model.capacity = 0; or parallel.expert_exchange = \"weights\" or \"all-to-all\"")
        });
        let exchange = self.expert_exchange;
        let given = [ExchangeKind::Auto, ExchangeKind::AllToAll].contains(&exchange);
        values.rule(&[POLICY, "parallel.expert_exchange"], given, || {
            let exchange = exchange.name();
            Problem::new(format!(
                "{POLICY} = \"{name}\" does not work with parallel.expert_exchange = \"{exchange}\""
            ))
            .because("it chooses between rows that travel and weights that do")
            .fix(format!("leave parallel.expert_exchange out, or {POLICY} = \"static\""))
        });
        let waits = self.updates_wait() && !self.post_validation;
        values.rule(&[POLICY, "parallel.schedule"], waits, || {
            Problem::new(format!("{POLICY} = \"{name}\" needs updates that wait for all ranks"))
                .because("it decides between steps")
                .fix("parallel.schedule = \"1f1b\" without parallel.post_validation")
        });
        values.rule(&[POLICY, "parallel.layout"], self.layout == LayoutKind::Given, || {
            Problem::new(format!(
                "{POLICY} = \"{name}\" does not work with parallel.layout = \"auto\""
            ))
            .because("a search finds one layout for all steps")
            .fix(format!("parallel.layout = \"given\", or {POLICY} = \"static\""))
        });
    }
}

impl Config {
    /// Where ranks of `parallel.cp` share groups of tokens, rows are gathered among them, and gradients of experts are sums
    /// over other ranks than where all experts are read.
    pub(crate) fn check_shared_groups(&self, packed: bool, values: &mut Values) {
        let (cp, group) = (self.parallel.cp.get(), self.model.group.get());
        let chooses = packed
            && self.parallel.ep.get() > 1
            && self.parallel.expert_policy == PolicyKind::Tutel;
        let apart = cp == 1 || (self.train.seq_len.get() / cp).is_multiple_of(group);
        let keys = ["parallel.expert_policy", "parallel.cp", "model.group"];
        values.rule(&keys, !chooses || apart, || {
            Problem::new(format!(
                "parallel.expert_policy = \"tutel\" does not work with parallel.cp = {cp} and model.group = {group}"
            ))
            .because("ranks of parallel.cp share a group of tokens, so the two layouts sum gradients of experts over different ranks")
            .fix("a model.group that divides train.seq_len / parallel.cp")
        });
    }
}
