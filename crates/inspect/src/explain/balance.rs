//! A drawing of the work of causal attention in a ring: each rank in each step, contiguous blocks of a sequence
//! above the order that is used.
//!
//! A step lasts as long as its busiest rank needs: all wait for it before blocks go on.

use phalanx_config::{Config, CpKind, CpOrder};
use phalanx_error::{Error, Problem, Result};
use phalanx_ir::{LocalPart, Order};
use phalanx_pipeline::picture::{Anchor, Page, Weight};

/// Pixels.
const MARGIN: f64 = 24.0;
const LEFT: f64 = 90.0;
const TOP: f64 = 76.0;
const ROW: f64 = 26.0;
const BAR: f64 = 18.0;
const WIDE: f64 = 640.0;
const PANEL: f64 = 64.0;
/// Room for a sum at the end of a row.
const SUM: f64 = 40.0;

const WORK: &str = "#2362a5";
const EMPTY: &str = "#eef1f4";

/// The drawing for a configuration, which must have a ring.
pub fn ring_balance(config: &Config) -> Result<String> {
    let (parallel, seq) = (&config.parallel, config.train.seq_len.get());
    let ranks = parallel.cp.get();
    if parallel.cp_kind != CpKind::Ring || ranks < 2 {
        let problem = Problem::new("there is no ring whose work could be drawn");
        let fix = "--set parallel.cp=4 --set parallel.cp_kind=ring";
        return Err(Error::refused(problem.because("blocks of keys do not go around").fix(fix)));
    }
    let order = match parallel.cp_order {
        CpOrder::Block => Order::Block,
        CpOrder::Zigzag => Order::Zigzag,
        CpOrder::Striped => Order::Striped,
    };
    let mut panels = vec![Balance::new(Order::Block, ranks, seq)];
    panels.extend((order != Order::Block).then(|| Balance::new(order, ranks, seq)));
    Ok(svg(&panels, &format!("Causal attention in a ring: {ranks} ranks, {seq} tokens")))
}

/// What each rank does in each step.
struct Balance {
    order: Order,
    /// Scores by rank and step, in units of (tokens of a rank)².
    work: Vec<Vec<f64>>,
}

impl Balance {
    fn new(order: Order, ranks: usize, seq: usize) -> Self {
        // Zigzag gives two blocks to each rank.
        let extent = seq.next_multiple_of(2 * ranks);
        let part = |shard: usize| LocalPart { order, shard, shards: ranks, extent };
        let unit = (seq as f64 / ranks as f64).powi(2);
        let scores = |rank: usize, step: usize| {
            let (own, keys) = (part(rank), part((rank + step) % ranks));
            let seen = |query: usize| keys.valid((own.global(query) + 1).min(seq));
            (0..own.valid(seq)).map(seen).sum::<usize>() as f64 / unit
        };
        let steps = |rank: usize| (0..ranks).map(|step| scores(rank, step)).collect();
        Self { order, work: (0..ranks).map(steps).collect() }
    }

    /// How long each step lasts: as long as its busiest rank needs.
    fn steps(&self) -> Vec<f64> {
        let longest = |step: usize| self.work.iter().map(|own| own[step]).fold(0.0, f64::max);
        (0..self.work.len()).map(longest).collect()
    }

    fn name(&self) -> &'static str {
        match self.order {
            Order::Block => "block: one contiguous part of the sequence on each rank",
            Order::Zigzag => "zigzag: of twice as many parts, one from each end on each rank",
            Order::Striped => "striped: positions are distributed one by one",
        }
    }
}

fn svg(panels: &[Balance], title: &str) -> String {
    let ranks = panels[0].work.len() as f64;
    let height = TOP + panels.len() as f64 * (ranks * ROW + PANEL);
    let total = |panel: &Balance| panel.steps().iter().sum::<f64>();
    let scale = WIDE / panels.iter().map(total).fold(f64::MIN_POSITIVE, f64::max);
    let mut page = Page::new(LEFT + WIDE + SUM + 2.0 * MARGIN, height);
    page.text((MARGIN, 30.0), 16.0, Weight::Bold, Anchor::Start, title);
    let unit = "Lengths are work, in units of (tokens of a rank)². A step ends when its busiest rank is done.";
    page.text((MARGIN, 50.0), 12.0, Weight::Soft, Anchor::Start, unit);
    for (number, panel) in panels.iter().enumerate() {
        panel.draw(&mut page, TOP + number as f64 * (ranks * ROW + PANEL), scale);
    }
    page.finish()
}

impl Balance {
    fn draw(&self, page: &mut Page, top: f64, scale: f64) {
        let (lengths, left) = (self.steps(), MARGIN + LEFT);
        let sum: f64 = lengths.iter().sum();
        let name = format!("{}: {sum:.2} in all", self.name());
        page.text((MARGIN, top + 12.0), 12.0, Weight::Bold, Anchor::Start, &name);
        let rows = top + 24.0;
        for (rank, own) in self.work.iter().enumerate() {
            let y = rows + rank as f64 * ROW;
            let label = format!("rank {rank}");
            page.text((MARGIN, y + BAR - 5.0), 12.0, Weight::Plain, Anchor::Start, &label);
            let mut x = left;
            for (step, (work, length)) in own.iter().zip(&lengths).enumerate() {
                page.block((x, y), (length * scale, BAR), EMPTY, "waits");
                let what = format!("rank {rank}, step {step}: {work:.2}");
                if *work > 0.0 {
                    page.block((x, y), (work * scale, BAR), WORK, &what);
                }
                x += length * scale;
            }
            let share = format!("{:.2}", own.iter().sum::<f64>());
            page.text((x + 8.0, y + BAR - 5.0), 11.0, Weight::Soft, Anchor::Start, &share);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The closed forms: a ring of contiguous blocks takes P − ½ units, zigzag P/2, up to the diagonal.
    #[test]
    fn steps_take_what_the_closed_forms_say() {
        for ranks in [2, 4, 8] {
            let seq = 512 * ranks;
            let sum = |order| Balance::new(order, ranks, seq).steps().iter().sum::<f64>();
            let p = ranks as f64;
            assert!((sum(Order::Block) - (p - 0.5)).abs() < 2e-3, "{}", sum(Order::Block));
            assert!((sum(Order::Zigzag) - p / 2.0).abs() < 2e-3, "{}", sum(Order::Zigzag));
            assert!((sum(Order::Striped) - p / 2.0).abs() < 3e-3 * p, "{}", sum(Order::Striped));
        }
    }

    /// Whatever the order and the length, each score is computed once.
    #[test]
    fn every_score_is_computed_once() {
        for (order, seq) in [(Order::Block, 13), (Order::Zigzag, 13), (Order::Striped, 29)] {
            let balance = Balance::new(order, 4, seq);
            let unit = (seq as f64 / 4.0).powi(2);
            let all: f64 = balance.work.iter().flatten().map(|work| work * unit).sum();
            assert!((all - (seq * (seq + 1) / 2) as f64).abs() < 1e-6, "{order:?}: {all}");
        }
    }
}
