//! Evaluating a model on data, and what it predicts for given inputs.

use std::collections::BTreeMap;
use std::sync::Arc;

use phalanx_data::{Corpus, Split};
use phalanx_error::{Error, Problem, Result};
use phalanx_models::hf::WeightTensor;
use phalanx_session::corpus::with_step_data;
use phalanx_session::{Accuracy, Session};

use crate::data_source::{Cutting, loader};
use crate::mistake::Mistake;
use crate::table::{Rows, Table};

/// What a model reached on data: the result of
/// [`Training::evaluate`](crate::Training::evaluate).
///
/// ```
/// use phalanx::{Mlp, Table, Trainer};
///
/// let data = Table::new(3).input("x", vec![0.0, 1.0, 2.0]).labels("y", vec![0, 1, -1]);
/// let told = Trainer::new(Mlp::classifier(1, [8], 2)).batch(2).build()?.evaluate(&data)?;
/// assert_eq!(told.count, 2); // a negative label does not count
/// assert!(told.accuracy >= Some(0.0) && told.loss > 0.0);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Evaluation {
    /// The steps taken before it.
    pub after_step: usize,
    /// The mean loss.
    pub loss: f64,
    /// What the mean is over: valid targets, elements of targets, or labels.
    pub count: u64,
    /// The share of labels for which the model's largest logit is that of the label; none if the
    /// data is no table with one column of [labels](Table::labels), or the model predicts no logits
    /// for them.
    pub accuracy: Option<f64>,
}

/// The most micro-batches of a corpus that an evaluation reads.
const MOST_BATCHES: u64 = 64;

/// Evaluates the held-out part of a corpus, one micro-batch of `rows` samples at a time.
pub(crate) fn of_tokens(
    session: &mut Session,
    corpus: &Arc<dyn Corpus>,
    cutting: Cutting,
) -> Result<Evaluation> {
    let mut loader = loader(Arc::clone(corpus), cutting, Split::Validation, 0)?;
    let (mut sum, mut count) = (0.0, 0);
    for _ in 0..loader.batches_per_pass().min(MOST_BATCHES) {
        let batch = loader
            .next_batch()
            .map_err(|error| Error::failed(Problem::from(error.diagnostic()).caused_by(error)))?;
        if batch.valid_tokens > 0 {
            let mean = with_step_data(batch, |data| session.evaluate(data))?;
            sum += mean * batch.valid_tokens as f64;
            count += batch.valid_tokens;
        }
    }
    finish(session, sum, count, None)
}

/// Evaluates every row of a table. The last micro-batch is filled up with its last row, whose loss
/// is then subtracted as often as it was added.
pub(crate) fn of_table(session: &mut Session, table: &Table, rows: usize) -> Result<Evaluation> {
    let mut own = Rows::new(table);
    let (mut sum, mut count) = (0.0, 0);
    let samples = table.samples();
    for first in (0..samples).step_by(rows) {
        let end = samples.min(first + rows);
        own.clear();
        (first..end).for_each(|row| own.push(table, row));
        count += own.count();
        let missing = first + rows - end;
        (0..missing).for_each(|_| own.push(table, end - 1));
        // Divided by 1, the loss is the sum over the rows.
        sum += own.with(first as u64, 1, |data| session.evaluate(data))?;
        if missing > 0 {
            own.clear();
            (0..rows).for_each(|_| own.push(table, end - 1));
            let all = own.with(first as u64, 1, |data| session.evaluate(data))?;
            sum -= all * missing as f64 / rows as f64;
        }
    }
    let accuracy = match table.only_labels() {
        Some(labels) if session.predicts() => accuracy(labels, predict(session, table, rows)?),
        _ => None,
    };
    finish(session, sum, count, accuracy)
}

/// What the model predicts for every row of a table: the values that it exposes for each sample.
pub(crate) fn predict(
    session: &mut Session,
    table: &Table,
    rows: usize,
) -> Result<BTreeMap<String, WeightTensor>> {
    let mut own = Rows::new(table);
    let mut all: BTreeMap<String, (Vec<usize>, Vec<f64>)> = BTreeMap::new();
    let samples = table.samples();
    for first in (0..samples).step_by(rows) {
        let valid = (samples - first).min(rows);
        own.clear();
        (first..first + rows).for_each(|row| own.push(table, row.min(samples - 1)));
        for (name, part) in own.with(first as u64, 1, |data| session.predict(data))? {
            if part.shape.first() == Some(&rows) {
                let shape = [&[samples], &part.shape[1..]].concat();
                let (_, values) = all.entry(name).or_insert_with(|| (shape, Vec::new()));
                let width = part.len() / rows;
                values.extend(&part.to_f64()[..valid * width]);
            }
        }
    }
    let tensor = |(shape, values)| WeightTensor::f64(shape, values);
    Ok(all.into_iter().map(|(name, found)| (name, tensor(found))).collect())
}

fn finish(session: &Session, sum: f64, count: u64, accuracy: Option<f64>) -> Result<Evaluation> {
    if count == 0 {
        let what = "no target is valid".to_owned();
        return Err(Mistake::NothingToEvaluate { what }.into());
    }
    let (after_step, loss) = (session.steps() as usize, sum / count as f64);
    Ok(Evaluation { after_step, loss, count, accuracy })
}

/// The share of labels that have the largest logit; none if nothing predicted has logits for them.
fn accuracy(labels: &[i32], predicted: BTreeMap<String, WeightTensor>) -> Option<f64> {
    let logits = |tensor: &WeightTensor| {
        let classes = tensor.shape.last().copied().unwrap_or(0);
        classes > 1 && tensor.len() == labels.len() * classes
    };
    let tensor = predicted.into_values().find(logits)?;
    let mut all = Accuracy::default();
    all.count(&tensor.to_f64(), labels);
    all.share()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_logit_decides_and_negative_labels_do_not_count() {
        let logits = WeightTensor::f64([4, 2], vec![0.0, 1.0, 2.0, 1.0, 0.0, 3.0, 5.0, 4.0]);
        let told = |labels: &[i32]| {
            accuracy(labels, BTreeMap::from([("logits".to_owned(), logits.clone())]))
        };
        assert_eq!(told(&[1, 0, 1, 0]), Some(1.0));
        assert_eq!(told(&[1, 1, 1, 0]), Some(0.75));
        assert_eq!(told(&[1, -1, 0, -1]), Some(0.5));
        assert_eq!(told(&[-1; 4]), None);
        assert_eq!(told(&[1, 0]), None, "other shapes are no logits of these labels");
    }
}
