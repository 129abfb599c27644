//! The load of experts over time as an SVG picture: a row for each expert of each layer, a column for
//! some steps. White is nothing, the middle tone an even share, dark twice as much or more, so the
//! picture is readable in black and white.

use std::fmt::Write;

use phalanx_session::ExpertLoad;

/// The loads of steps so far; of long runs, means over several steps.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct LoadPlot {
    /// By layer, the number of experts.
    layers: Vec<usize>,
    /// The first and the last step.
    steps: Option<(usize, usize)>,
    /// How many steps a column has.
    every: usize,
    /// Whole columns: by layer and expert, the load as a multiple of an even share.
    columns: Vec<Vec<f64>>,
    /// The sum over the steps of the last column, and how many these are.
    open: (Vec<f64>, usize),
}

/// More columns than this would be narrower than a point.
const MOST_COLUMNS: usize = 256;
const WIDTH: f64 = 768.0;
const LEFT: f64 = 76.0;
const TOP: f64 = 62.0;
const ROW: f64 = 8.0;
const GAP: f64 = 6.0;

impl LoadPlot {
    /// Adds the load of a step, if it has one.
    pub fn extend(&mut self, step: usize, load: Option<ExpertLoad>) {
        let Some(load) = load else { return };
        self.layers = load.chosen.iter().map(Vec::len).collect();
        self.steps = Some((self.steps.map_or(step, |(first, _)| first), step));
        self.every = self.every.max(1);
        let even = |chosen: &Vec<f64>| chosen.iter().sum::<f64>().max(1.0) / chosen.len() as f64;
        let shares = load.chosen.iter().flat_map(|chosen| {
            let even = even(chosen);
            chosen.iter().map(move |count| count / even)
        });
        let (sums, count) = &mut self.open;
        sums.resize(self.layers.iter().sum(), 0.0);
        sums.iter_mut().zip(shares).for_each(|(sum, share)| *sum += share);
        *count += 1;
        if *count == self.every {
            self.close();
        }
    }

    /// Ends the last column; if there are too many, two become one.
    fn close(&mut self) {
        let (sums, count) = std::mem::take(&mut self.open);
        self.columns.push(sums.iter().map(|sum| sum / count as f64).collect());
        if self.columns.len() == MOST_COLUMNS {
            let both = |pair: &[Vec<f64>]| {
                pair[0].iter().zip(&pair[1]).map(|(a, b)| f64::midpoint(*a, *b)).collect()
            };
            self.columns = self.columns.chunks_exact(2).map(both).collect();
            self.every *= 2;
        }
    }

    /// The picture as a complete SVG file; none if no step had experts.
    pub fn to_svg(&self) -> Option<String> {
        let (first, last) = self.steps?;
        let (sums, count) = &self.open;
        let open: Vec<f64> = sums.iter().map(|sum| sum / (*count).max(1) as f64).collect();
        let columns: Vec<&Vec<f64>> =
            self.columns.iter().chain((*count > 0).then_some(&open)).collect();
        let rows: usize = self.layers.iter().sum();
        let height = TOP + rows as f64 * ROW + self.layers.len() as f64 * GAP + 40.0;
        let (full, wide) = (LEFT + WIDTH + 28.0, WIDTH / columns.len().max(1) as f64);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {full} {height}\" \
             font-family=\"sans-serif\" font-size=\"12\" fill=\"#222222\">\n\
             <rect width=\"{full}\" height=\"{height}\" fill=\"white\"/>\n\
             <text x=\"{LEFT}\" y=\"26\" font-size=\"16\">Load of experts, steps {first} to {last}</text>\n\
             <text x=\"{LEFT}\" y=\"46\" fill=\"#5a5a5a\">white: nothing; middle: an even share; dark: \
             twice as much or more; one row per expert, layers with experts in order</text>\n"
        );
        let (mut row, mut y) = (0, TOP);
        for (layer, &experts) in self.layers.iter().enumerate() {
            let middle = y + experts as f64 * ROW / 2.0 + 4.0;
            let _ = writeln!(svg, "<text x=\"8\" y=\"{middle}\">layer {}</text>", layer + 1);
            for _ in 0..experts {
                for (at, column) in columns.iter().enumerate() {
                    let (x, fill) = (LEFT + at as f64 * wide, tone(column[row]));
                    let _ = writeln!(
                        svg,
                        "<rect x=\"{x:.2}\" y=\"{y}\" width=\"{wide:.2}\" height=\"{ROW}\" fill=\"{fill}\"/>"
                    );
                }
                (row, y) = (row + 1, y + ROW);
            }
            y += GAP;
        }
        svg += "</svg>\n";
        Some(svg)
    }
}

/// From white, nothing, to dark blue, twice an even share.
fn tone(share: f64) -> String {
    let part = (share / 2.0).clamp(0.0, 1.0);
    let mix = |dark: f64| (255.0 + part * (dark - 255.0)).round() as u8;
    format!("#{:02x}{:02x}{:02x}", mix(10.0), mix(40.0), mix(95.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(counts: [f64; 2]) -> Option<ExpertLoad> {
        Some(ExpertLoad { chosen: vec![counts.to_vec()], dropped: 0.0 })
    }

    #[test]
    fn shares_are_drawn_by_expert_and_step() {
        let mut plot = LoadPlot::default();
        assert_eq!(plot.to_svg(), None);
        plot.extend(3, load([8.0, 0.0]));
        plot.extend(4, load([4.0, 4.0]));
        let svg = plot.to_svg().unwrap();
        assert!(svg.contains("steps 3 to 4") && svg.contains("layer 1"), "{svg}");
        // All of them, none of them, and twice an even share.
        let count = |tone: &str| svg.matches(&format!("fill=\"{tone}\"")).count();
        assert_eq!([tone(2.0), tone(0.0), tone(1.0)].map(|tone| count(&tone)), [1, 1, 2]);
    }

    #[test]
    fn a_long_run_has_few_columns() {
        let mut plot = LoadPlot::default();
        (1..=1000).for_each(|step| plot.extend(step, load([2.0, 6.0])));
        assert!(plot.columns.len() < MOST_COLUMNS && plot.columns.len() > MOST_COLUMNS / 4);
        assert!(plot.columns.iter().all(|column| *column == [0.5, 1.5]));
    }
}
