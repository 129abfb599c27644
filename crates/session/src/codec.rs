//! Answers of ranks as bytes, for the processes of other ranks. They are of the same build, so the
//! form may change with any commit; what does not decode is a broken stream.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use phalanx_call::{Lane, Tier, Value};
use phalanx_checkpoint::{FileSummary, Piece};
use phalanx_comm::OpKind;
use phalanx_engine::{CallPart, PartKind};
use phalanx_ir::{Axis, DType};
use phalanx_runtime::{Observed, TimedAction};
use phalanx_script::{Category, Moved, Outcome, Part, Route, ScheduledRun, ScriptKey, StateKind};

use super::command::{Exposed, Measured, Reply, StatePiece, StateRange, StepReply};
use super::save::SavedFiles;
use super::traced::{Traced, TracedStep};
use super::{StepResult, StepRoom, StepScale};

/// A value that can be written as bytes and read back.
pub(super) trait Code: Sized {
    fn put(&self, out: &mut Vec<u8>);
    fn take(from: &mut &[u8]) -> Option<Self>;
}

/// The bytes of a value.
pub(super) fn encoded(value: &impl Code) -> Vec<u8> {
    let mut out = Vec::new();
    value.put(&mut out);
    out
}

/// The value of all these bytes.
pub(super) fn decoded<T: Code>(mut bytes: &[u8]) -> Option<T> {
    let value = T::take(&mut bytes)?;
    bytes.is_empty().then_some(value)
}

impl Code for u64 {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.to_le_bytes());
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        let (first, rest) = from.split_first_chunk()?;
        *from = rest;
        Some(u64::from_le_bytes(*first))
    }
}

impl Code for usize {
    fn put(&self, out: &mut Vec<u8>) {
        (*self as u64).put(out);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        usize::try_from(u64::take(from)?).ok()
    }
}

impl Code for f64 {
    fn put(&self, out: &mut Vec<u8>) {
        self.to_bits().put(out);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        u64::take(from).map(f64::from_bits)
    }
}

impl Code for bool {
    fn put(&self, out: &mut Vec<u8>) {
        u64::from(*self).put(out);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        u64::take(from).map(|number| number != 0)
    }
}

/// Bytes of any length.
pub(super) struct Bytes(pub(super) Vec<u8>);

fn put_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    bytes.len().put(out);
    out.extend_from_slice(bytes);
}

impl Code for Bytes {
    fn put(&self, out: &mut Vec<u8>) {
        put_bytes(&self.0, out);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        let len = usize::take(from)?;
        let (own, rest) = from.split_at_checked(len)?;
        *from = rest;
        Some(Self(own.to_vec()))
    }
}

impl Code for String {
    fn put(&self, out: &mut Vec<u8>) {
        put_bytes(self.as_bytes(), out);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        String::from_utf8(Bytes::take(from)?.0).ok()
    }
}

impl<T: Code> Code for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.len().put(out);
        self.iter().for_each(|own| own.put(out));
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        let count = usize::take(from)?;
        (0..count).map(|_| T::take(from)).collect()
    }
}

impl<T: Code> Code for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        self.iter().for_each(|own| own.put(out));
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        match bool::take(from)? {
            false => Some(None),
            true => T::take(from).map(Some),
        }
    }
}

impl<A: Code, B: Code> Code for (A, B) {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        Some((A::take(from)?, B::take(from)?))
    }
}

impl<A: Code + Ord, B: Code> Code for BTreeMap<A, B> {
    fn put(&self, out: &mut Vec<u8>) {
        self.len().put(out);
        self.iter().for_each(|(key, value)| {
            key.put(out);
            value.put(out);
        });
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        let count = usize::take(from)?;
        (0..count).map(|_| <(A, B)>::take(from)).collect()
    }
}

/// Kinds are written as their place in a list of all.
macro_rules! listed {
    ($($kind:ty: $all:expr;)+) => {$(
        impl Code for $kind {
            fn put(&self, out: &mut Vec<u8>) {
                let place = $all.iter().position(|other| other == self);
                place.expect("the list has every kind").put(out);
            }
            fn take(from: &mut &[u8]) -> Option<Self> {
                $all.get(usize::take(from)?).copied()
            }
        }
    )+};
}

listed! {
    DType: DType::ALL;
    Category: Category::ALL;
    Lane: Lane::ALL;
    Part: [Part::F, Part::B, Part::W, Part::BW, Part::FBW, Part::R];
    ScriptKey: ScriptKey::ALL;
    PartKind: PartKind::ALL;
}

/// Fields one after the other.
macro_rules! fields {
    ($($kind:ident { $($field:ident),+ })+) => {$(
        impl Code for $kind {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)+
            }
            fn take(from: &mut &[u8]) -> Option<Self> {
                Some(Self { $($field: Code::take(from)?),+ })
            }
        }
    )+};
}

pub(super) use fields;

fields! {
    StepResult { loss, grad_norm, scaling, repeated, room }
    StepRoom { bound, repeats, lacking }
    StepScale { loss_scale, overflowed, skipped }
    StepReply { result, outcome, traced }
    TracedStep { script, actions }
    Traced { label, turn, peers, value, bytes, times, kernels }
    CallPart { name, started, ended, kind }
    ScheduledRun { instance, part, microbatch }
    Value { instance, port, microbatch, again }
    TimedAction { action, lane, issued, started, ended }
    Exposed { shape, pieces }
    Moved { calls, bytes }
    Measured { moved, predicted, rows, product_seconds, scratch_bytes, busy_seconds }
    StateRange { param, kind, elements }
    SavedFiles { disk, copies, needs }
    FileSummary { name, bytes, pieces }
    Piece { at, bytes, hash }
}

impl Code for StatePiece {
    fn put(&self, out: &mut Vec<u8>) {
        self.first.put(out);
        self.dtype.put(out);
        put_bytes(&self.bytes, out);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        let (first, dtype) = (usize::take(from)?, DType::take(from)?);
        Some(Self { first, dtype, bytes: Bytes::take(from)?.0 })
    }
}

impl Code for std::sync::Arc<str> {
    fn put(&self, out: &mut Vec<u8>) {
        put_bytes(self.as_bytes(), out);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        String::take(from).map(Into::into)
    }
}

impl Code for Duration {
    fn put(&self, out: &mut Vec<u8>) {
        (self.as_nanos() as u64).put(out);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        u64::take(from).map(Duration::from_nanos)
    }
}

impl Code for Range<usize> {
    fn put(&self, out: &mut Vec<u8>) {
        (self.start, self.end).put(out);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        <(usize, usize)>::take(from).map(|(start, end)| start..end)
    }
}

impl Code for Outcome {
    fn put(&self, out: &mut Vec<u8>) {
        let (kind, key) = match self {
            Outcome::Applied => (0, None),
            Outcome::Skipped => (1, None),
            Outcome::Repeat(key) => (2, Some(*key)),
        };
        (kind as u64, key).put(out);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        match <(u64, Option<ScriptKey>)>::take(from)? {
            (0, None) => Some(Outcome::Applied),
            (1, None) => Some(Outcome::Skipped),
            (2, Some(key)) => Some(Outcome::Repeat(key)),
            _ => None,
        }
    }
}

impl Code for StateKind {
    fn put(&self, out: &mut Vec<u8>) {
        let (kind, number) = match self {
            StateKind::Weights => (0, 0),
            StateKind::Master => (1, 0),
            StateKind::Gradient => (2, 0),
            StateKind::Optimizer(number) => (3, *number),
            StateKind::Older(age) => (4, *age),
            StateKind::Preview => (5, 0),
        };
        (kind as u64, number as u64).put(out);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        match <(u64, u64)>::take(from)? {
            (0, _) => Some(StateKind::Weights),
            (1, _) => Some(StateKind::Master),
            (2, _) => Some(StateKind::Gradient),
            (3, number) => Some(StateKind::Optimizer(number.try_into().ok()?)),
            (4, age) => Some(StateKind::Older(age.try_into().ok()?)),
            (5, _) => Some(StateKind::Preview),
            _ => None,
        }
    }
}

/// Ops are names of [`OpKind`].
impl Code for Route {
    fn put(&self, out: &mut Vec<u8>) {
        put_bytes(self.op.as_bytes(), out);
        let names: Vec<String> = self.axes.iter().map(Axis::to_string).collect();
        names.put(out);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        let (name, axes) = <(String, Vec<String>)>::take(from)?;
        let op = OpKind::ALL.into_iter().map(OpKind::name).find(|op| *op == name)?;
        let axes = axes.iter().map(|name| Axis::new(name).ok()).collect::<Option<_>>()?;
        Some(Self { op, axes })
    }
}

impl Code for Observed {
    fn put(&self, out: &mut Vec<u8>) {
        self.peaks.put(out);
        self.peaks_by_tier.iter().for_each(|peaks| peaks.put(out));
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        let peaks = Code::take(from)?;
        let tiers = Tier::ALL.map(|_| Code::take(from));
        let [device, host, disk] = tiers;
        Some(Self { peaks, peaks_by_tier: [device?, host?, disk?] })
    }
}

impl Code for Reply {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Reply::Done => 0_u64.put(out),
            Reply::Steps(steps) => {
                1_u64.put(out);
                steps.put(out);
            }
            Reply::Loss(loss) => (2_u64, *loss).put(out),
            Reply::Shown(shown) => {
                3_u64.put(out);
                shown.put(out);
            }
            Reply::Pieces(pieces) => {
                4_u64.put(out);
                pieces.put(out);
            }
            Reply::Observed(observed) => {
                5_u64.put(out);
                observed.put(out);
            }
            Reply::Measured(measured) => {
                6_u64.put(out);
                measured.put(out);
            }
            Reply::Saved(file) => {
                7_u64.put(out);
                file.put(out);
            }
            Reply::Scalars(scalars) => {
                8_u64.put(out);
                scalars.put(out);
            }
        }
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        Some(match u64::take(from)? {
            0 => Reply::Done,
            1 => Reply::Steps(Code::take(from)?),
            2 => Reply::Loss(Code::take(from)?),
            3 => Reply::Shown(Code::take(from)?),
            4 => Reply::Pieces(Code::take(from)?),
            5 => Reply::Observed(Box::new(Code::take(from)?)),
            6 => Reply::Measured(Box::new(Code::take(from)?)),
            7 => Reply::Saved(Code::take(from)?),
            8 => Reply::Scalars(Code::take(from)?),
            _ => return None,
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails should stop")]
mod tests {
    use super::*;

    fn replies() -> Vec<Reply> {
        let route = Route { op: "reduce_scatter", axes: vec![Axis::new("tp.1").unwrap()] };
        let moved: BTreeMap<Route, Moved> = [(route, Moved { calls: 3, bytes: 1 << 40 })].into();
        let turn = ScheduledRun { instance: 2, part: Part::R, microbatch: 1 };
        let value = Value { instance: 2, port: "h".into(), microbatch: 1, again: true };
        let ms = Duration::from_millis;
        let times = TimedAction {
            action: 9,
            lane: Lane::Send,
            issued: ms(1),
            started: ms(2),
            ended: ms(3),
        };
        let label = "blocks.3 BW mb 0 é".to_owned();
        let kind = PartKind::Ends;
        let kernels =
            vec![CallPart { name: "product".to_owned(), started: ms(2), ended: ms(3), kind }];
        let (turn, value) = (Some(turn), Some(value));
        let traced = Traced { label, turn, peers: vec![1, 3], value, bytes: 64, times, kernels };
        let step = TracedStep { script: ScriptKey::SaveAndTrain, actions: vec![traced] };
        let scaling = Some(StepScale { loss_scale: 8.0, overflowed: true, skipped: 3 });
        let room = StepRoom { bound: 2, repeats: 1, lacking: 17 };
        let (loss, grad_norm, repeated) = (-0.0, f64::INFINITY, true);
        let result = StepResult { loss, grad_norm, scaling, repeated, room };
        let outcome = Outcome::Repeat(ScriptKey::Train);
        let piece = StatePiece { first: 7, dtype: DType::Bf16, bytes: vec![1, 2, 255] };
        let peaks = vec![(Category::Weights, 5), (Category::Inputs, 0)];
        let peaks_by_tier = [peaks.clone(), vec![], vec![(Category::Optimizer, 1)]];
        let (scratch_bytes, busy_seconds) = (3, Some(0.5));
        let measured = Measured {
            predicted: moved.clone(),
            moved,
            rows: vec![crate::command::some_rows(turn.unwrap())],
            product_seconds: 1.5,
            scratch_bytes,
            busy_seconds,
        };
        vec![
            Reply::Done,
            Reply::Steps(vec![StepReply { result, outcome, traced: Some(step) }]),
            Reply::Loss(3.25),
            Reply::Shown(None),
            Reply::Shown(Some(Exposed { shape: vec![2, 3], pieces: vec![piece.clone()] })),
            Reply::Pieces(vec![piece]),
            Reply::Scalars(vec![("loss_scale".to_owned(), 0.5)]),
            Reply::Observed(Box::new((1, Observed { peaks, peaks_by_tier }))),
            Reply::Measured(Box::new(measured)),
        ]
    }

    #[test]
    fn replies_come_back_as_they_went() {
        for reply in replies() {
            let bytes = encoded(&reply);
            let back: Reply = decoded(&bytes).unwrap();
            assert_eq!(format!("{back:?}"), format!("{reply:?}"));
            // Half an answer, and more than one, is none.
            (0..bytes.len()).for_each(|end| assert!(decoded::<Reply>(&bytes[..end]).is_none()));
            assert!(decoded::<Reply>(&[&bytes[..], &[0]].concat()).is_none());
        }
        let kinds = [StateKind::Weights, StateKind::Master, StateKind::Gradient];
        for kind in kinds.into_iter().chain([StateKind::Optimizer(1), StateKind::Older(2)]) {
            let range = StateRange { param: 3, kind, elements: 5..9 };
            assert_eq!(decoded::<StateRange>(&encoded(&range)), Some(range));
        }
    }
}
