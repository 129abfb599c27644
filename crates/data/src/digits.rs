//! Digits that are drawn when they are read: nothing to download.
//!
//! A digit is a few strokes in a box. Of each image the strokes' points move a little, the whole is
//! stretched, slanted and shifted, the pen has its own width, and every pixel some noise. All of it is a
//! pure function of seed, part and index, made of sums, products and square roots alone: so every machine
//! draws the same bits.

use phalanx_ir::random::Stream;

use crate::{DataError, Images, Split};

/// The built-in digits, of 28 × 28 pixels, in as many images as MNIST has.
#[derive(Clone, Copy, Debug)]
pub struct Digits {
    seed: u64,
}

const SIDE: usize = 28;
const TRAIN: u64 = 60_000;
const HELD_OUT: u64 = 10_000;

type Point = (f64, f64);

/// The strokes of each digit, from point to point: right and down, in a box of one by one.
const STROKES: [&[Point]; 10] = [
    &[
        (0.50, 0.08),
        (0.76, 0.20),
        (0.84, 0.50),
        (0.76, 0.80),
        (0.50, 0.92),
        (0.24, 0.80),
        (0.16, 0.50),
        (0.24, 0.20),
        (0.50, 0.08),
    ],
    &[(0.34, 0.26), (0.55, 0.08), (0.55, 0.92)],
    &[
        (0.20, 0.28),
        (0.32, 0.12),
        (0.56, 0.08),
        (0.76, 0.22),
        (0.74, 0.42),
        (0.50, 0.64),
        (0.20, 0.92),
        (0.82, 0.92),
    ],
    &[
        (0.20, 0.14),
        (0.58, 0.08),
        (0.78, 0.25),
        (0.68, 0.43),
        (0.44, 0.48),
        (0.72, 0.56),
        (0.80, 0.74),
        (0.60, 0.92),
        (0.20, 0.86),
    ],
    &[(0.66, 0.92), (0.66, 0.08), (0.14, 0.64), (0.86, 0.64)],
    &[
        (0.78, 0.08),
        (0.28, 0.08),
        (0.25, 0.46),
        (0.58, 0.42),
        (0.80, 0.58),
        (0.76, 0.80),
        (0.50, 0.92),
        (0.20, 0.84),
    ],
    &[
        (0.70, 0.08),
        (0.42, 0.28),
        (0.24, 0.58),
        (0.30, 0.84),
        (0.52, 0.92),
        (0.75, 0.80),
        (0.72, 0.58),
        (0.50, 0.50),
        (0.27, 0.64),
    ],
    &[(0.18, 0.08), (0.82, 0.08), (0.42, 0.92)],
    &[
        (0.50, 0.48),
        (0.25, 0.32),
        (0.30, 0.14),
        (0.50, 0.08),
        (0.70, 0.14),
        (0.75, 0.32),
        (0.50, 0.48),
        (0.22, 0.68),
        (0.30, 0.86),
        (0.50, 0.92),
        (0.70, 0.86),
        (0.78, 0.68),
        (0.50, 0.48),
    ],
    &[
        (0.76, 0.36),
        (0.60, 0.50),
        (0.35, 0.47),
        (0.24, 0.28),
        (0.40, 0.10),
        (0.66, 0.13),
        (0.76, 0.36),
        (0.70, 0.66),
        (0.52, 0.92),
    ],
];

impl Digits {
    /// Digits that are determined by `seed`.
    pub fn new(seed: u64) -> Self {
        Self { seed }
    }
}

impl Images for Digits {
    fn size(&self) -> [usize; 2] {
        [SIDE; 2]
    }

    fn classes(&self) -> usize {
        STROKES.len()
    }

    fn samples(&self, split: Split) -> u64 {
        match split {
            Split::Train => TRAIN,
            Split::Validation => HELD_OUT,
        }
    }

    fn read(&self, split: Split, index: u64, pixels: &mut [u8]) -> Result<u8, DataError> {
        let part = match split {
            Split::Train => "digits",
            Split::Validation => "held-out digits",
        };
        // Each image has its own thousand numbers: its class and form, points, and pixels.
        let mut dice = Dice { stream: Stream::named(self.seed, part), next: index << 10 };
        let class = (dice.number() * 10.0) as usize % 10;
        let points = moved(STROKES[class], &mut dice);
        let pen = 0.9 + 0.7 * dice.number();
        for (place, pixel) in pixels.iter_mut().enumerate() {
            let at = ((place % SIDE) as f64 + 0.5, (place / SIDE) as f64 + 0.5);
            let away = points.windows(2).map(|ends| distance(at, ends[0], ends[1]));
            let away = away.fold(f64::INFINITY, f64::min);
            let ink = (pen + 0.5 - away).clamp(0.0, 1.0);
            let noise = 0.15 * (dice.number() - 0.5);
            *pixel = (255.0 * (ink + noise).clamp(0.0, 1.0)) as u8;
        }
        Ok(class as u8)
    }

    fn describe(&self) -> String {
        format!(
            "drawn digits of {SIDE} × {SIDE} ({TRAIN} images, {HELD_OUT} held out, seed {})",
            self.seed
        )
    }
}

/// Numbers of one image, one after the other.
struct Dice {
    stream: Stream,
    next: u64,
}

impl Dice {
    /// A number from 0 to 1.
    fn number(&mut self) -> f64 {
        self.next += 1;
        self.stream.uniform(self.next)
    }

    /// A number from −by to by.
    fn about(&mut self, by: f64) -> f64 {
        by * (2.0 * self.number() - 1.0)
    }
}

/// Strokes in pixels: shaken, stretched, slanted and shifted.
fn moved(strokes: &[Point], dice: &mut Dice) -> Vec<Point> {
    let (wide, high) = (17.0 + dice.about(3.0), 20.0 + dice.about(2.0));
    let (slant, tilt) = (dice.about(0.25), dice.about(0.12));
    let (right, down) = (14.0 + dice.about(2.5), 14.0 + dice.about(2.5));
    let points = strokes.iter().map(|&(x, y)| {
        let (x, y) = (x - 0.5 + dice.about(0.035), y - 0.5 + dice.about(0.035));
        (right + wide * (x - slant * y), down + high * (y + tilt * x))
    });
    points.collect()
}

/// How far a point is from the line between two others.
fn distance(p: Point, a: Point, b: Point) -> f64 {
    let (dx, dy) = (b.0 - a.0, b.1 - a.1);
    let along = ((p.0 - a.0) * dx + (p.1 - a.1) * dy) / (dx * dx + dy * dy).max(1e-9);
    let along = along.clamp(0.0, 1.0);
    let (x, y) = (a.0 + along * dx - p.0, a.1 + along * dy - p.1);
    (x * x + y * y).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(digits: &Digits, split: Split, index: u64) -> (u8, Vec<u8>) {
        let mut pixels = vec![0; SIDE * SIDE];
        let class = digits.read(split, index, &mut pixels).unwrap();
        (class, pixels)
    }

    #[test]
    fn an_image_is_a_function_of_seed_part_and_index() {
        let digits = Digits::new(3);
        for index in [0, 7, TRAIN - 1] {
            assert_eq!(image(&digits, Split::Train, index), image(&digits, Split::Train, index));
            let held_out = image(&digits, Split::Validation, index);
            assert_ne!(image(&digits, Split::Train, index).1, held_out.1);
        }
        assert_ne!(image(&digits, Split::Train, 0).1, image(&Digits::new(4), Split::Train, 0).1);
    }

    #[test]
    fn every_class_is_drawn_about_as_often_and_inside() {
        let digits = Digits::new(0);
        let mut counts = [0; 10];
        for index in 0..2000 {
            let (class, pixels) = image(&digits, Split::Train, index);
            counts[class as usize] += 1;
            let ink = pixels.iter().filter(|&&pixel| pixel > 128).count();
            assert!((20..300).contains(&ink), "image {index} of a {class} has {ink} dark pixels");
        }
        assert!(counts.iter().all(|&count| (140..260).contains(&count)), "{counts:?}");
    }
}
