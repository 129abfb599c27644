//! How often a classifier is right: its largest logit against the class of each sample.

use phalanx_error::Result;
use phalanx_models::port;
use phalanx_script::ScriptKey;

use crate::command::{Command, Reply};
use crate::{Field, Forward, Session, StepData, forward};

/// Samples that count, and how many of them were classified right.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Accuracy {
    /// Samples that were classified right.
    pub right: u64,
    /// Samples that count.
    pub samples: u64,
}

impl Accuracy {
    /// The share that was right; `None` of nothing.
    pub fn share(self) -> Option<f64> {
        (self.samples > 0).then(|| self.right as f64 / self.samples as f64)
    }

    /// Counts more samples.
    pub fn add(&mut self, more: Option<Accuracy>) {
        let Accuracy { right, samples } = more.unwrap_or_default();
        self.right += right;
        self.samples += samples;
    }

    /// Counts samples by their logits and classes; negative classes do not count.
    pub fn count(&mut self, logits: &[f64], classes: &[i32]) {
        let width = logits.len() / classes.len().max(1);
        for (logits, &class) in logits.chunks_exact(width.max(1)).zip(classes) {
            let Ok(class) = usize::try_from(class) else { continue };
            self.samples += 1;
            self.right += u64::from(largest(logits) == Some(class));
        }
    }
}

/// The first of the largest logits; none if no logit is a number.
fn largest(logits: &[f64]) -> Option<usize> {
    let numbers = logits.iter().enumerate().filter(|(_, logit)| !logit.is_nan());
    let larger = |best: (usize, f64), next: (usize, f64)| if next.1 > best.1 { next } else { best };
    numbers.map(|(class, &logit)| (class, logit)).reduce(larger).map(|(class, _)| class)
}

/// The classes of a batch, if the model is a classifier.
fn classes<'a>(data: &StepData<'a>) -> Option<&'a [i32]> {
    data.fields.iter().find_map(|(name, field)| match field {
        Field::I32(values) if *name == port::Y => Some(*values),
        _ => None,
    })
}

impl Session {
    /// How many samples of the batch that was just trained on, or evaluated, were classified right.
    /// `None` if the model classifies nothing or exposes no logits here. Replicas that train by themselves are
    /// counted each on its share of the batch.
    pub fn accuracy(&mut self, key: ScriptKey, data: &StepData<'_>) -> Result<Option<Accuracy>> {
        let Some(classes) = classes(data) else { return Ok(None) };
        if !self.known.predicting.contains(&key) {
            return Ok(None);
        }
        let (parts, replicas) = (self.known.settings.microbatches, self.known.first_ranks.len());
        let mut all = Accuracy::default();
        let mut shares = classes.chunks(classes.len() / (parts * replicas));
        for microbatch in 0..parts {
            let answers = self.ranks.ask(Command::Show {
                key,
                port: port::PREDICTION,
                instance: None,
                microbatch,
            })?;
            for logits in self.logits(answers)? {
                all.count(&logits, shares.next().unwrap_or_default());
            }
        }
        Ok(Some(all))
    }

    /// The logits of each replica, from the answers of all ranks.
    fn logits(&self, answers: Vec<Reply>) -> Result<Vec<Vec<f64>>> {
        let mut by_replica: Vec<Vec<Reply>> = Vec::new();
        by_replica.resize_with(self.known.first_ranks.len(), Vec::new);
        for (rank, answer) in answers.into_iter().enumerate() {
            by_replica[self.known.replicas[rank]].push(answer);
        }
        let logits = |own| Ok(forward::gathered(port::PREDICTION, own)?.to_f64());
        by_replica.into_iter().map(logits).collect()
    }
}

impl Forward {
    /// The same of the batch that was just run.
    pub fn accuracy(&mut self, data: &StepData<'_>, parts: usize) -> Result<Option<Accuracy>> {
        let Some(classes) = classes(data) else { return Ok(None) };
        let mut all = Accuracy::default();
        for (microbatch, classes) in classes.chunks(classes.len() / parts).enumerate() {
            all.count(&self.probe(port::PREDICTION, microbatch)?, classes);
        }
        Ok(Some(all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_logit_of_a_sample_that_counts_is_compared() {
        let mut all = Accuracy::default();
        all.count(&[0.1, 0.7, 0.2, 0.9, 0.0, 0.1, 0.3, 0.2, 0.5], &[1, 2, -1]);
        assert_eq!(all, Accuracy { right: 1, samples: 2 });
        all.add(Some(Accuracy { right: 2, samples: 2 }));
        all.add(None);
        assert_eq!(all.share(), Some(0.75));
        assert_eq!(Accuracy::default().share(), None);
        // Logits that are all alike say the first class, and no other.
        let mut alike = Accuracy::default();
        alike.count(&[0.0; 6], &[0, 1]);
        assert_eq!(alike, Accuracy { right: 1, samples: 2 });
    }
}
