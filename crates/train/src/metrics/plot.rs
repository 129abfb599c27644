//! The loss curve as an SVG picture.
//!
//! Raw losses are faint points, their running mean is a line, held-out losses are rings, and the
//! entropy of the source is a dashed line that no model can go below. The four differ in shape and
//! in lightness, so that the picture is readable in black and white.

use std::fmt::Write;

/// What the picture shows.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct LossPlot {
    /// Printed above the picture.
    pub title: String,
    /// Training loss of each step.
    pub losses: Vec<(usize, f64)>,
    /// Losses on held-out data.
    pub held_out: Vec<(usize, f64)>,
    /// Entropy of the source, in nats per token.
    pub entropy_floor: Option<f64>,
}

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 520.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 28.0;
const TOP: f64 = 78.0;
const BOTTOM: f64 = 62.0;

const INK: &str = "#222222";
const SOFT: &str = "#5a5a5a";
const GRID: &str = "#e4e4e4";
const POINT: &str = "#6f9fd0";
const CURVE: &str = "#15457f";
const RING: &str = "#c4570a";

/// More raw points than this only make the file larger.
const MOST_POINTS: usize = 2000;

impl LossPlot {
    /// The picture as a complete SVG file. Values that are not finite are left out.
    pub fn to_svg(&self) -> String {
        let losses = finite(&self.losses);
        let held_out = finite(&self.held_out);
        let floor = self.entropy_floor.filter(|floor| floor.is_finite());
        let frame = Frame::around(&losses, &held_out, floor);
        let mut svg = Svg::new(&self.title);
        svg.axes(&frame);
        svg.raw_points(&frame, &losses);
        if let Some(floor) = floor {
            svg.floor(&frame, floor);
        }
        // Smoothed twice, which gives a calmer line.
        let mean = (losses.len() >= SMOOTHED).then(|| smooth(&smooth(&losses)));
        svg.curve(&frame, mean.as_deref().unwrap_or(&losses));
        svg.rings(&frame, &held_out);
        svg.legend(!losses.is_empty(), mean.is_some(), !held_out.is_empty());
        svg.finish()
    }
}

/// The range of values on each axis, and their places on the page.
struct Frame {
    steps: (f64, f64),
    loss: (f64, f64),
    step_ticks: Vec<f64>,
    loss_ticks: Vec<f64>,
}

impl Frame {
    /// A frame that holds all values, with a small margin above and below.
    fn around(losses: &[(f64, f64)], held_out: &[(f64, f64)], floor: Option<f64>) -> Self {
        let points = || losses.iter().chain(held_out);
        let last = points().map(|p| p.0).fold(1.0, f64::max);
        let values = || points().map(|p| p.1).chain(floor);
        let (low, high) = match values().next() {
            None => (0.0, 1.0),
            Some(first) => (values().fold(first, f64::min), values().fold(first, f64::max)),
        };
        let air = 0.06 * (high - low).max(0.01 * high.abs()).max(1e-9);
        let loss = (low - air, high + air);
        Frame {
            steps: (0.0, last),
            loss,
            // Ticks are at whole steps only.
            step_ticks: ticks(0.0, last, 8, 1.0),
            loss_ticks: ticks(loss.0, loss.1, 8, 0.0),
        }
    }

    fn x(&self, step: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * (step - self.steps.0) / (self.steps.1 - self.steps.0)
    }

    fn y(&self, loss: f64) -> f64 {
        HEIGHT
            - BOTTOM
            - (HEIGHT - TOP - BOTTOM) * (loss - self.loss.0) / (self.loss.1 - self.loss.0)
    }
}

/// The text of an SVG file, in the order in which things are drawn over one another.
struct Svg(String);

impl Svg {
    fn new(title: &str) -> Self {
        let mut svg = Svg(String::new());
        svg.add(format_args!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="system-ui, 'Helvetica Neue', Arial, sans-serif" font-size="13">"#
        ));
        svg.add(format_args!(r##"<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>"##));
        svg.text(LEFT, 32.0, "start", INK, r#" font-size="17" font-weight="600""#, title);
        svg
    }

    /// Writing to a string cannot fail, so the result can be ignored.
    fn add(&mut self, element: std::fmt::Arguments<'_>) {
        let _ = writeln!(self.0, "{element}");
    }

    fn text(&mut self, x: f64, y: f64, anchor: &str, fill: &str, more: &str, text: &str) {
        let text = escaped(text);
        self.add(format_args!(
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" fill="{fill}"{more}>{text}</text>"#
        ));
    }

    fn line(&mut self, from: (f64, f64), to: (f64, f64), stroke: &str, more: &str) {
        self.add(format_args!(
            r#"<line x1="{:.1}" y1="{:.1}" x2="{:.1}" y2="{:.1}" stroke="{stroke}"{more}/>"#,
            from.0, from.1, to.0, to.1
        ));
    }

    fn axes(&mut self, frame: &Frame) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for &loss in &frame.loss_ticks {
            let y = frame.y(loss);
            self.line((LEFT, y), (right, y), GRID, "");
            self.text(LEFT - 10.0, y + 4.5, "end", SOFT, "", &label(loss, &frame.loss_ticks));
        }
        for &step in &frame.step_ticks {
            let x = frame.x(step);
            self.line((x, TOP), (x, bottom), GRID, "");
            self.text(x, bottom + 20.0, "middle", SOFT, "", &label(step, &frame.step_ticks));
        }
        self.line((LEFT, bottom), (right, bottom), INK, "");
        self.line((LEFT, TOP), (LEFT, bottom), INK, "");
        self.text((LEFT + right) / 2.0, HEIGHT - 16.0, "middle", INK, "", "step");
        let (x, y) = (22.0, (TOP + bottom) / 2.0);
        let turned = format!(r#" transform="rotate(-90 {x} {y})""#);
        self.text(x, y, "middle", INK, &turned, "loss (nats per token)");
    }

    fn raw_points(&mut self, frame: &Frame, losses: &[(f64, f64)]) {
        let points = thinned(losses);
        // Few points can be large; many would hide one another.
        let radius = (160.0 / points.len().max(1) as f64).clamp(1.0, 2.0) * 2.0;
        self.add(format_args!(r#"<g fill="{POINT}" fill-opacity="0.6">"#));
        for (step, loss) in points {
            let (x, y) = (frame.x(step), frame.y(loss));
            self.add(format_args!(r#"<circle cx="{x:.1}" cy="{y:.1}" r="{radius:.1}"/>"#));
        }
        self.add(format_args!("</g>"));
    }

    fn curve(&mut self, frame: &Frame, curve: &[(f64, f64)]) {
        let mut points = String::new();
        for &(step, loss) in thinned(curve).iter() {
            let _ = write!(points, "{:.1},{:.1} ", frame.x(step), frame.y(loss));
        }
        self.add(format_args!(
            r#"<polyline points="{}" fill="none" stroke="{CURVE}" stroke-width="2.4" stroke-linejoin="round"/>"#,
            points.trim_end()
        ));
    }

    fn rings(&mut self, frame: &Frame, held_out: &[(f64, f64)]) {
        for &(step, loss) in held_out {
            self.ring(frame.x(step), frame.y(loss));
        }
    }

    fn ring(&mut self, x: f64, y: f64) {
        self.add(format_args!(
            r##"<circle cx="{x:.1}" cy="{y:.1}" r="4.6" fill="#ffffff" stroke="{RING}" stroke-width="2.2"/>"##
        ));
    }

    fn floor(&mut self, frame: &Frame, floor: f64) {
        let y = frame.y(floor);
        let dashes = r#" stroke-width="1.6" stroke-dasharray="7 5""#;
        self.line((LEFT, y), (WIDTH - RIGHT, y), INK, dashes);
        // White behind the letters keeps them legible where the curve comes close.
        let halo = r##" stroke="#ffffff" stroke-width="4" paint-order="stroke""##;
        let text = format!("entropy of the source {floor:.3}");
        self.text(LEFT + 10.0, y - 7.0, "start", INK, halo, &text);
    }

    /// In a row above the picture, where it hides nothing.
    fn legend(&mut self, has_losses: bool, has_mean: bool, has_held_out: bool) {
        let (mut x, y) = (LEFT + 6.0, TOP - 22.0);
        let mut entry = |svg: &mut Self, mark: f64, text: &str, width: f64| {
            svg.text(x + mark + 8.0, y + 4.5, "start", INK, "", text);
            x += width;
            x - width
        };
        if has_losses {
            let x = entry(self, 0.0, "loss of a step", 124.0);
            let dot = format_args!(r#"<circle cx="{x:.1}" cy="{y:.1}" r="3.2" fill="{POINT}"/>"#);
            self.add(dot);
        }
        if has_mean {
            let x = entry(self, 20.0, "running mean", 152.0);
            self.line((x, y), (x + 20.0, y), CURVE, r#" stroke-width="2.4""#);
        }
        if has_held_out {
            let x = entry(self, 4.0, "held-out loss", 0.0);
            self.ring(x, y);
        }
    }

    fn finish(mut self) -> String {
        self.add(format_args!("</svg>"));
        self.0
    }
}

fn finite(points: &[(usize, f64)]) -> Vec<(f64, f64)> {
    let finite = points.iter().filter(|(_, loss)| loss.is_finite());
    finite.map(|(step, loss)| (*step as f64, *loss)).collect()
}

/// With fewer steps a window would hold fewer than five of them, and the mean would go through the
/// steps themselves.
const SMOOTHED: usize = 100;

/// The mean over a centred window of a twenty-fifth of the run: unlike a mean of the past, it does
/// not lag behind a falling loss. At the ends the window shrinks on both sides.
fn smooth(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let half = points.len() / 50;
    let mut sums = vec![0.0];
    for (_, loss) in points {
        sums.push(sums[sums.len() - 1] + loss);
    }
    let mean = |(i, (step, _)): (usize, &(f64, f64))| {
        let reach = half.min(i).min(points.len() - 1 - i);
        let (from, to) = (i - reach, i + reach + 1);
        (*step, (sums[to] - sums[from]) / (to - from) as f64)
    };
    points.iter().enumerate().map(mean).collect()
}

/// At most [`MOST_POINTS`] of the points, evenly spread, the last included.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let stride = points.len().div_ceil(MOST_POINTS).max(1);
    points.iter().rev().step_by(stride).rev().copied().collect()
}

/// Round numbers within a range: multiples of 1, 2 or 5 times a power of ten, at most `most`, and
/// at least `apart` from one another.
fn ticks(low: f64, high: f64, most: usize, apart: f64) -> Vec<f64> {
    let least = ((high - low) / most as f64).max(apart);
    let power = 10f64.powf(least.log10().floor());
    let factors = [1.0, 2.0, 5.0, 10.0];
    let factor = factors.into_iter().find(|f| f * power >= least).unwrap_or(10.0);
    let spacing = factor * power;
    let (first, last) = ((low / spacing).ceil() as i64, (high / spacing).floor() as i64);
    (first..=last).map(|i| i as f64 * spacing).collect()
}

/// A tick's label, with enough decimals to differ from its neighbours.
fn label(value: f64, ticks: &[f64]) -> String {
    let spacing = match ticks {
        [first, second, ..] => second - first,
        _ => value.abs().max(1e-9),
    };
    // A difference of two ticks may be one bit less than 0.01, so a little is added.
    let decimals = (-(1.001 * spacing).log10().floor()).clamp(0.0, 9.0) as usize;
    format!("{value:.decimals$}")
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(svg: &str, what: &str) -> usize {
        svg.matches(what).count()
    }

    #[test]
    fn every_series_is_drawn() {
        let plot = LossPlot {
            title: "a < b & c".into(),
            losses: (1..=100).map(|s| (s, 5.0 / s as f64 + 2.0)).collect(),
            held_out: vec![(50, 2.2), (100, 2.1)],
            entropy_floor: Some(1.75),
        };
        let svg = plot.to_svg();
        assert_eq!(count(&svg, r#"r="3.2""#), 100 + 1, "a dot for each step, one in the legend");
        assert_eq!(count(&svg, r#"r="4.6""#), 2 + 1, "two rings and one in the legend");
        assert_eq!(count(&svg, "stroke-dasharray"), 1);
        assert!(svg.contains("entropy of the source 1.750") && svg.contains("a &lt; b &amp; c"));
        assert_eq!(count(&svg, "<g"), count(&svg, "</g>"));
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    }

    #[test]
    fn everything_stays_inside_the_frame() {
        let losses = [(1, 5.0), (2, -3.0), (3, 9.0)];
        let frame = Frame::around(&finite(&losses), &[], Some(-4.0));
        for (step, loss) in finite(&losses).into_iter().chain([(0.0, -4.0)]) {
            assert!((LEFT..=WIDTH - RIGHT).contains(&frame.x(step)));
            assert!((TOP..=HEIGHT - BOTTOM).contains(&frame.y(loss)));
        }
        assert!(frame.y(9.0) < frame.y(-3.0), "larger losses are higher up");
    }

    #[test]
    fn runs_without_a_usable_loss_still_give_a_picture() {
        let nan = vec![(1, f64::NAN), (2, f64::INFINITY)];
        for losses in [vec![], nan, vec![(1, 2.0)], vec![(1, 0.0), (2, 0.0)]] {
            let svg = LossPlot { losses, ..LossPlot::default() }.to_svg();
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }

    #[test]
    fn smoothing_leaves_a_straight_line_alone() {
        let line: Vec<(f64, f64)> = (0..300).map(|i| (i as f64, 7.0 - 0.01 * i as f64)).collect();
        for ((_, a), (_, b)) in smooth(&line).iter().zip(&line) {
            assert!((a - b).abs() < 1e-9);
        }
    }

    #[test]
    fn ticks_are_round_and_labelled_apart() {
        assert_eq!(ticks(0.0, 250.0, 8, 1.0), [0.0, 50.0, 100.0, 150.0, 200.0, 250.0]);
        assert_eq!(ticks(0.0, 4.0, 8, 1.0), [0.0, 1.0, 2.0, 3.0, 4.0], "whole steps");
        assert_eq!(ticks(0.0, 1.0, 8, 1.0), [0.0, 1.0]);
        let fine = ticks(2.97, 3.04, 7, 0.0);
        let labels: Vec<String> = fine.iter().map(|t| label(*t, &fine)).collect();
        assert_eq!(labels, ["2.97", "2.98", "2.99", "3.00", "3.01", "3.02", "3.03", "3.04"]);
    }

    #[test]
    fn long_runs_are_thinned_but_keep_their_end() {
        let points: Vec<(f64, f64)> = (0..50_000).map(|i| (i as f64, 1.0)).collect();
        let thin = thinned(&points);
        assert!(thin.len() <= MOST_POINTS);
        assert_eq!(thin.last(), points.last());
    }
}
