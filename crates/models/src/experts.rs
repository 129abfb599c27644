//! A feed-forward part of many experts, of which each token takes a few: GShard (Lepikhin et al.,
//! 2020), Switch (Fedus et al., 2021), the normalised gates of Mixtral (Jiang et al., 2024), and noisy
//! top-k (Shazeer et al., 2017).
//!
//! Tokens come in groups. In each group every expert has `capacity` places, first choices are
//! placed before second ones, and a token without a place is carried by the residual stream alone.
//! The groups belong to the model, so the same tokens are dropped on any number of ranks. Probabilities
//! and gates are computed in the accumulator type, also where everything else has 16 bits.
//!
//! Costs: products of `experts · capacity` rows for each group, which is `top_k · capacity factor` per
//! token. Without dropping (MegaBlocks: Gale et al., 2022) rows are packed by expert: products of `top_k`
//! rows per token, whatever is chosen. Where experts are divided among ranks, each has room for so many rows
//! (`experts/room.rs`), and multiplies those that there are.

mod losses;
mod room;
mod skew;

pub use room::Capacity;

use phalanx_ir::ops::{CompareKind, Deal, Matmul, NoiseKind, Queue};
use phalanx_ir::{Builder, Init, IrError, Tensor};

use crate::architecture::{BatchShape, Purpose, port};
use crate::check::Check;

/// The experts of a model.
#[derive(Clone, PartialEq, Debug)]
pub struct Experts {
    /// How many there are in a layer.
    pub count: usize,
    /// How a token chooses.
    pub router: Router,
    /// Places of each expert in a group.
    pub capacity: Capacity,
    /// Among how many ranks experts are divided, where nobody is dropped: rows are packed for each of them.
    pub parts: usize,
    /// To how many ranks experts are distributed round robin: with eight on four, the first rank has 0 and 4. 1: ranks have
    /// neighbours, the first one 0 and 1.
    pub dealt: usize,
    /// Whether a step may also leave rows where their tokens are, on ranks that read all experts then.
    pub may_stay: bool,
    /// Where nobody is dropped: room for the rows of each such rank in training, or places of each expert
    /// ([`Capacity::Fitting`]), as a multiple of their even share; none: for the worst choices. A step that lacks room
    /// is taken again with more.
    pub slack: Option<f64>,
    /// Into how many regions, one after the other, the samples of a batch are packed for each such rank: as many as
    /// data-parallel ranks; none: into one for each group of tokens.
    pub regions: Option<usize>,
    /// Tokens that share places; `None`: a sequence.
    pub group: Option<usize>,
    /// Inner width of an expert.
    pub ffn: usize,
    /// Layer `i`, counted from 1, has experts if this divides `i`; the others are dense.
    pub every: usize,
    /// Experts besides, of the same width, that every token takes (DeepSeekMoE).
    pub shared: usize,
    /// Whether the dense part stays, and experts add to it (the residual experts of DeepSpeed-MoE).
    pub residual: bool,
    /// How much the balancing loss counts.
    pub aux_loss: f64,
    /// What the balancing loss is taken over.
    pub aux_scope: AuxScope,
    /// How much the squared log-sum-exp of the router's logits counts.
    pub z_loss: f64,
    /// In training, the router sees each number times one that is drawn from 1 − jitter to 1 + jitter
    /// (Switch).
    pub jitter: f64,
    /// How much rarer than the first an expert is chosen, of equally likely ones: as the power of its number.
    pub bias_zipf: f64,
    /// Places in evaluation, if not as many as in training.
    pub eval_capacity: Option<Capacity>,
    /// In training, the share of numbers inside an expert that dropout sets to zero (Switch, in fine-tuning).
    pub dropout: f64,
    /// The variance of an expert's initial weights is this, divided by what they multiply (Switch: 0.1); none: as
    /// other weights.
    pub init_scale: Option<f64>,
    /// How many there are in the last layers, if not as many.
    pub late: Option<LateExperts>,
}

/// Another number of experts in the last layers that have some: later layers gain more from them (the pyramid of
/// DeepSpeed-MoE: Rajbhandari et al., 2022).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LateExperts {
    /// How many layers, of those that have experts.
    pub layers: usize,
    /// Experts of each.
    pub count: usize,
}

/// Which layers have experts, and how many.
pub(crate) struct ExpertLayers {
    /// All layers of the model.
    pub(crate) layers: usize,
    /// Layer `i`, counted from 1, has experts if this divides `i`.
    pub(crate) every: usize,
    /// Experts of a layer.
    pub(crate) count: usize,
    /// The last ones, if they differ.
    pub(crate) late: Option<LateExperts>,
}

impl ExpertLayers {
    /// The experts of a layer, counted from zero; none if it is dense.
    pub(crate) fn of(&self, layer: usize) -> Option<usize> {
        let has = |layer: &usize| (layer + 1).is_multiple_of(self.every.max(1));
        let behind = (layer + 1..self.layers).filter(has).count();
        let late = self.late.filter(|late| behind < late.layers);
        has(&layer).then_some(late.map_or(self.count, |late| late.count))
    }
}

/// How a token chooses its experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Router {
    /// The likeliest one, times its probability.
    Switch,
    /// The `k` likeliest, with gates that add up to one.
    TopK {
        /// How many each token takes.
        k: usize,
    },
    /// The two likeliest, with gates that add up to one. In training the second one is taken with twice
    /// its gate as probability, so a token rarely takes an expert that hardly counts.
    GShard,
    /// As [`Router::TopK`], after noise is added to the logits in training: a normal number times the softplus of a
    /// second product (Shazeer et al., 2017).
    Noisy {
        /// How many each token takes.
        k: usize,
    },
}

impl Router {
    /// How many experts a token takes.
    pub fn choices(self) -> usize {
        match self {
            Router::Switch => 1,
            Router::TopK { k } | Router::Noisy { k } => k,
            Router::GShard => 2,
        }
    }
}

/// The tokens whose load and probabilities meet in one balancing loss.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AuxScope {
    /// A group.
    Group,
    /// All tokens of a micro-batch, on all ranks.
    MicroBatch,
}

/// How many tokens and places a group has.
#[derive(Clone, Copy, Debug)]
struct Places {
    groups: usize,
    tokens: usize,
    capacity: usize,
}

impl Experts {
    /// Experts in every layer: 1.25 times their even share of places in a sequence, and a balancing loss of
    /// 0.01 over the micro-batch.
    pub fn new(count: usize, ffn: usize, router: Router) -> Self {
        Self {
            count,
            router,
            capacity: Capacity::Factor(1.25),
            parts: 1,
            dealt: 1,
            may_stay: false,
            slack: None,
            regions: None,
            group: None,
            ffn,
            every: 1,
            shared: 0,
            residual: false,
            aux_loss: 0.01,
            aux_scope: AuxScope::MicroBatch,
            z_loss: 0.0,
            jitter: 0.0,
            bias_zipf: 0.0,
            eval_capacity: None,
            dropout: 0.0,
            init_scale: None,
            late: None,
        }
    }

    /// The experts of a layer, counted from zero, of so many, and the name of its segment; none if it is dense.
    pub(crate) fn at(&self, layer: usize, layers: usize) -> Option<(&'static str, Self)> {
        let Self { every, count, late, .. } = *self;
        let count = ExpertLayers { layers, every, count, late }.of(layer)?;
        let name = if count == self.count { "expert_block" } else { "late_expert_block" };
        Some((name, Self { count, late: None, ..self.clone() }))
    }

    /// Whether a parameter of this name is one of those that ranks have parts of: a matrix for each expert.
    pub(crate) fn divides(name: &str) -> bool {
        ["experts.gate", "experts.up", "experts.down"].iter().any(|own| name.ends_with(own))
    }

    /// The initial values of an expert's weights, or the router's, where they have a scale of their own: of a
    /// parameter by its local name, in a layer of this width.
    pub(crate) fn init(&self, name: &str, width: usize) -> Option<Init> {
        let inputs = match name {
            "experts.router" | "experts.noise" | "experts.gate" | "experts.up" => width,
            "experts.down" => self.ffn,
            _ => return None,
        };
        self.init_scale.map(|scale| Init::Normal((scale / inputs as f64).sqrt()))
    }

    /// The feed-forward part: `x` is `[batch, seq, width]`, and so is the result.
    pub(crate) fn apply<'b>(
        &self,
        b: &'b Builder,
        x: Tensor<'b>,
        BatchShape { batch, seq }: BatchShape,
        purpose: Purpose,
    ) -> Tensor<'b> {
        let (count, ffn, width) = (self.count, self.ffn, x.shape()[2]);
        let places = self.places(seq, purpose);
        let Places { groups, tokens, capacity } = places;
        let x = x.reshape([batch, groups, tokens, width]);
        let logits = self.logits(b, x, purpose);
        let chances = logits.softmax();
        let k = self.router.choices();
        let (gates, index) = chances.top_k(k);
        let gates = match self.router {
            Router::Switch => gates,
            Router::TopK { .. } | Router::Noisy { .. } | Router::GShard => {
                let total = gates.sum(&[3]).broadcast([batch, groups, tokens, k], &[3]);
                gates / total
            }
        };
        let stands = self.stands(gates, purpose);
        let place = match self.dealt {
            1 => index,
            parts => index.deal(Deal { experts: count, parts, per: 1 }),
        };
        let packed = self.is_packed(purpose);
        // With a region for every expert, places are what packed rows have there.
        let of = Queue { experts: count, parts: count, room: capacity };
        let placed = (!packed).then(|| x.queue(place, of, stands));
        let chosen = (purpose == Purpose::Train).then(|| match stands {
            None => index.histogram(count, 1, chances.dtype()),
            // With a place for every token, only choices that don't stand have none.
            Some(_) => {
                index.assign(count, tokens, stands).histogram(count, tokens, chances.dtype())
            }
        });
        if let Some(chosen) = chosen {
            self.balance(b, chances, index, places);
            self.restrain(b, logits, seq);
            b.probe(port::CHOSEN, chosen);
            if let Some((_, slot, _)) = placed {
                let placed = slot.histogram(count, capacity, chances.dtype());
                match self.capacity {
                    Capacity::Fitting => Self::tell_unplaced(b, chosen, placed, places),
                    Capacity::Factor(_) | Capacity::Dropless => b.probe(port::PLACED, placed),
                }
            }
        }
        let gate = b.param("experts.gate", [count, width, ffn]);
        let up = b.param("experts.up", [count, width, ffn]);
        let down = b.param("experts.down", [count, ffn, width]);
        let rows = match placed {
            Some((rows, slot, _)) => {
                let product = |w| rows.einsum(w, "ebncd,edf->ebncf");
                let inner = self.dropped(product(gate).silu() * product(up), purpose);
                inner.einsum(down, "ebncf,efd->ebncd").combine(slot, gates)
            }
            None => {
                let shape = self.regions_of([batch, groups, tokens]);
                let wide = |x: Tensor<'b>, last| match shape == [batch, groups, tokens] {
                    true => x,
                    false => x.reshape([shape[0], shape[1], shape[2], last]),
                };
                let [place, gates] = [place, gates].map(|x| wide(x, k));
                let (of, stands) = (self.queue(shape[2], purpose), stands.map(|x| wide(x, k)));
                let (rows, slot, counts) = wide(x, width).queue(place, of, stands);
                chosen.into_iter().for_each(|chosen| self.tell_lacking(b, chosen, slot, of));
                let product = |w| rows.grouped_matmul(w, counts);
                let inner = product(gate).silu() * product(up);
                inner.grouped_matmul(down, counts).combine(slot, gates)
            }
        };
        rows.reshape([batch, seq, width])
    }

    /// The inner width of the experts that every token takes, if there are some.
    pub(crate) fn shared_ffn(&self) -> Option<usize> {
        (self.shared > 0).then_some(self.shared * self.ffn)
    }

    /// Which choices stand, if some may not: one with twice its gate as probability. The first of two has
    /// at least half, so it does, but where the number rounds to one and both are equal.
    fn stands<'b>(&self, gates: Tensor<'b>, purpose: Purpose) -> Option<Tensor<'b>> {
        if self.router != Router::GShard || purpose != Purpose::Train {
            return None;
        }
        Some(gates.scale(2.0).compare(CompareKind::Gt, gates.noise(NoiseKind::Uniform)))
    }

    /// The numbers inside experts after dropout, `[e, b, n, c, f]`. Its masks count samples along the first dim.
    fn dropped<'b>(&self, inner: Tensor<'b>, purpose: Purpose) -> Tensor<'b> {
        if self.dropout == 0.0 || purpose != Purpose::Train {
            return inner;
        }
        const BY_SAMPLE: [usize; 5] = [1, 0, 2, 3, 4];
        inner.transpose(&BY_SAMPLE).dropout(self.dropout).transpose(&BY_SAMPLE)
    }

    /// The router's product, of which nothing is rounded to 16 bits.
    fn logits<'b>(&self, b: &'b Builder, x: Tensor<'b>, purpose: Purpose) -> Tensor<'b> {
        let x = match self.jitter > 0.0 && purpose == Purpose::Train {
            false => x,
            true => {
                // Factors near 1 have too few values in 16 bits.
                let wide = x.cast(x.dtype().accumulator());
                let drawn = wide.noise(NoiseKind::Uniform);
                let factor = drawn.scale(2.0 * self.jitter).shift(1.0 - self.jitter);
                (wide * factor).cast(x.dtype())
            }
        };
        let product = |name: &str| {
            let weight = b.param(name, [x.shape()[3], self.count]);
            let spec = "bntd,de->bnte".parse().expect("a product of two tensors");
            b.apply(Matmul { spec, out: x.dtype().accumulator(), add: false }, &[x, weight])
        };
        let logits = self.skewed(b, product("experts.router"));
        match self.router {
            Router::Noisy { .. } if purpose == Purpose::Train => {
                let deviation = product("experts.noise").softplus();
                logits + logits.noise(NoiseKind::Normal) * deviation
            }
            Router::Noisy { .. } => {
                // Parameters are the same for every purpose.
                b.param("experts.noise", [x.shape()[3], self.count]);
                logits
            }
            Router::Switch | Router::TopK { .. } | Router::GShard => logits,
        }
    }

    fn places(&self, seq: usize, purpose: Purpose) -> Places {
        let tokens = self.tokens(seq, purpose);
        let even = self.router.choices() as f64 * tokens as f64 / self.count as f64;
        // Nobody chooses an expert twice, so no expert needs more places than there are tokens.
        let factor = match self.capacity_for(purpose) {
            Capacity::Factor(factor) => Some(factor),
            Capacity::Fitting if purpose == Purpose::Train => self.slack,
            Capacity::Fitting | Capacity::Dropless => None,
        };
        let capacity = match factor {
            Some(factor) => ((factor * even).ceil() as usize).clamp(1, tokens.max(1)),
            None => tokens,
        };
        Places { groups: seq / tokens.max(1), tokens, capacity }
    }

    /// Tokens of a group: a sequence that is shorter than a group is one.
    fn tokens(&self, seq: usize, purpose: Purpose) -> usize {
        match purpose {
            Purpose::Predict => seq,
            _ => self.group.unwrap_or(seq).min(seq),
        }
    }

    pub(crate) fn check(
        &self,
        check: &Check,
        width: usize,
        BatchShape { batch, seq }: BatchShape,
        purpose: Purpose,
    ) -> Result<(), IrError> {
        let (count, k) = (self.count, self.router.choices());
        let (experts, ffn) = (("experts", count), ("expert_ffn", self.ffn));
        let group = self.group.unwrap_or(seq);
        check.sizes(&[experts, ffn, ("top_k", k), ("moe_every", self.every), ("group", group)])?;
        check.sizes(&[("parts", self.parts)])?;
        self.slack.map_or(Ok(()), |slack| check.positive("slack", slack))?;
        check.that(k <= count, || {
            format!(
                "top_k = {k} of experts = {count}: a token takes an expert once; at most {count}"
            )
        })?;
        check.divides(("parts", self.parts), experts)?;
        check.sizes(&[("distributed", self.dealt)])?;
        check.divides(("distributed", self.dealt), experts)?;
        check.divides(("group", self.tokens(seq, purpose)), ("seq", seq))?;
        let factors = [
            ("capacity", self.capacity.factor()),
            ("eval_capacity", self.eval_capacity.and_then(Capacity::factor)),
            ("init_scale", self.init_scale),
        ];
        for (name, factor) in factors {
            factor.map_or(Ok(()), |factor| check.positive(name, factor))?;
        }
        check.that(self.dropout == 0.0 || self.capacity.factor().is_some(), || {
            format!("dropout of experts = {}: it needs a capacity factor", self.dropout)
        })?;
        check.that((0.0..1.0).contains(&self.dropout), || {
            format!("dropout of experts = {}: it must be at least 0 and below 1", self.dropout)
        })?;
        check.that((0.0..1.0).contains(&self.jitter), || {
            format!("jitter = {}: it must be at least 0 and below 1", self.jitter)
        })?;
        for (name, value) in [("aux_loss", self.aux_loss), ("z_loss", self.z_loss)] {
            check.that(value.is_finite() && value >= 0.0, || {
                format!("{name} = {value}: it must be a finite number of at least 0")
            })?;
        }
        if let Some(LateExperts { layers, count }) = self.late {
            check.sizes(&[("late_layers", layers), ("late_experts", count)])?;
            Self { count, late: None, ..self.clone() }.check(
                check,
                width,
                BatchShape { batch, seq },
                purpose,
            )?;
        }
        let Places { groups, capacity, .. } = self.places(seq, purpose);
        let places = ("places", batch * groups * capacity);
        check.tensor(&[experts, ("width", width), ffn])?;
        check.tensor(&[experts, places, ("width", width)])?;
        check.tensor(&[experts, places, ffn])
    }
}

#[cfg(test)]
mod tests;
