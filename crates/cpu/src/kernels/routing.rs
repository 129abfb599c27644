//! Choices of experts, places of tokens, and rows that go there and come back.
//!
//! A rank may hold only some experts (`e` is sharded): what other ranks' experts have is no place
//! here. A slot outside of all experts' is a token that was dropped.

use super::inlined::inlined;
use super::row;
use crate::element::{CpuElement, CpuFloat, vectorized};

/// The `k` largest of each row of `size` elements, of which `valid` count; the lower index wins a
/// tie, and a NaN is smaller than every number. Results have `stride` columns; those behind `k` are
/// zero.
pub fn top_k<T: CpuElement>(
    x: &[T],
    [size, valid]: [usize; 2],
    [stride, k]: [usize; 2],
    values: &mut [T],
    index: &mut [i32],
) {
    let rows = values.chunks_exact_mut(stride).zip(index.chunks_exact_mut(stride));
    for (row, (values, index)) in x.chunks_exact(size).zip(rows) {
        for at in 0..stride {
            let mut best = None;
            for (i, candidate) in row[..valid].iter().enumerate() {
                let taken = at < k && index[..at].contains(&(i as i32));
                if at >= k || taken {
                    continue;
                }
                let number = candidate.load();
                let is_nan = number.partial_cmp(&number).is_none();
                let better = match best {
                    None => true,
                    Some((_, _, true)) => !is_nan,
                    Some((_, most, false)) => number > most,
                };
                if better {
                    best = Some((i, number, is_nan));
                }
            }
            (values[at], index[at]) = match best {
                Some((i, ..)) => (row[i], i as i32),
                None => (T::default(), 0),
            };
        }
    }
}

/// Puts each of the first `k` of `stride` elements of dy where it was taken from in a row of `size`.
pub fn top_k_grad<T: CpuElement>(
    index: &[i32],
    dy: &[T],
    [stride, k]: [usize; 2],
    size: usize,
    dx: &mut [T],
) {
    dx.fill(T::default());
    let rows = index.chunks_exact(stride).zip(dy.chunks_exact(stride));
    for (dx, (index, dy)) in dx.chunks_exact_mut(size).zip(rows) {
        for (&at, &dy) in index.iter().zip(dy).take(k) {
            if let Some(dx) = usize::try_from(at).ok().and_then(|at| dx.get_mut(at)) {
                *dx = dy;
            }
        }
    }
}

/// Tokens of a group and their choices, of which some may be padding.
#[derive(Clone, Copy, Debug)]
pub struct Choices {
    /// Tokens of a group, and how many of them are valid.
    pub tokens: [usize; 2],
    /// Choices of a token, and how many of them are valid.
    pub k: [usize; 2],
}

impl Choices {
    /// Elements of a group.
    pub fn group(&self) -> usize {
        self.tokens[0] * self.k[0]
    }

    /// Whether the element with this number in its group is valid.
    #[inline(always)]
    fn holds(&self, at: usize) -> bool {
        at / self.k[0] < self.tokens[1] && at % self.k[0] < self.k[1]
    }
}

/// A slot for each choice of each token: all first choices get places before second ones. `taken`
/// has room for a number per expert; `stands` is empty if all choices stand.
pub fn assign(
    index: &[i32],
    stands: &[u8],
    choices: Choices,
    capacity: usize,
    taken: &mut [i32],
    slots: &mut [i32],
) {
    let (experts, k) = (taken.len(), choices.k[0]);
    slots.fill((experts * capacity) as i32);
    let groups = index.chunks_exact(choices.group().max(1)).enumerate();
    for (group, index) in groups {
        taken.fill(0);
        for choice in 0..choices.k[1] {
            for token in 0..choices.tokens[1] {
                let at = token * k + choice;
                let all = group * choices.group() + at;
                let expert = usize::try_from(index[at]).unwrap_or(experts);
                if expert >= experts || stands.get(all).is_some_and(|&stands| stands == 0) {
                    continue;
                }
                let place = taken[expert] as usize;
                if place < capacity {
                    slots[all] = (expert * capacity + place) as i32;
                    taken[expert] += 1;
                }
            }
        }
    }
}

/// The slot of each choice of a group's tokens, packed by the experts of each part, as far as there is room. `counts`
/// has room for a number per expert, how many rows it has, and `next` as well. `stands` is empty if all choices stand.
pub fn queue(
    index: &[i32],
    stands: &[u8],
    choices: Choices,
    [of_part, room]: [usize; 2],
    [counts, next]: [&mut [i32]; 2],
    slots: &mut [i32],
) {
    let (experts, k) = (counts.len(), choices.k[0]);
    slots.fill((experts / of_part * room) as i32);
    counts.fill(0);
    let expert = |at: usize| {
        let expert = usize::try_from(index[at]).unwrap_or(experts);
        let stands = stands.get(at).is_none_or(|&stands| stands != 0);
        (expert < experts && stands && choices.holds(at)).then_some(expert)
    };
    (0..index.len()).filter_map(expert).for_each(|expert| counts[expert] += 1);
    for (part, next) in next.chunks_exact_mut(of_part).enumerate() {
        let mut first = (part * room) as i32;
        let end = first + room as i32;
        for (next, count) in next.iter_mut().zip(&mut counts[part * of_part..]) {
            *next = first;
            *count = (*count).min(end - first);
            first += *count;
        }
    }
    for choice in 0..choices.k[1] {
        for token in 0..choices.tokens[1] {
            let at = token * k + choice;
            if let Some(expert) = expert(at) {
                let end = ((expert / of_part + 1) * room) as i32;
                if next[expert] < end {
                    slots[at] = next[expert];
                    next[expert] += 1;
                }
            }
        }
    }
}

/// How often each of the numbers from `first` on comes in each group, after division by `per`;
/// `width` of them, of which those below `size` are counted.
pub fn histogram<T: CpuElement>(
    numbers: &[i32],
    choices: Choices,
    per: usize,
    size: usize,
    [first, width]: [usize; 2],
    out: &mut [T],
) {
    let groups =
        numbers.chunks_exact(choices.group().max(1)).zip(out.chunks_exact_mut(width.max(1)));
    for (numbers, out) in groups {
        out.fill(T::default());
        for (i, out) in out.iter_mut().enumerate().take(size.saturating_sub(first)) {
            let wanted = first + i;
            let is = |(at, number): (usize, &i32)| {
                let same = usize::try_from(*number).is_ok_and(|number| number / per == wanted);
                same && choices.holds(at)
            };
            let count = numbers.iter().enumerate().filter(|&at| is(at)).count();
            *out = T::store(T::Acc::from_f64(count as f64));
        }
    }
}

/// How dispatched rows lie in memory, and which are here.
#[derive(Clone, Copy, Debug)]
pub struct Cells {
    /// All experts.
    pub experts: usize,
    /// Places of an expert in a group.
    pub capacity: usize,
    /// The first expert that is here, and how many are.
    pub held: [usize; 2],
    /// Groups that are here.
    pub groups: usize,
    /// Rows of an expert and a group: the places, and padding.
    pub rows: usize,
    /// The tokens that the rows are of.
    pub choices: Choices,
}

impl Cells {
    /// The row of the place that a (token, choice) has, if it is here.
    #[inline(always)]
    pub fn find(&self, group: usize, slot: i32) -> Option<usize> {
        let slot = usize::try_from(slot).ok().filter(|&s| s < self.experts * self.capacity)?;
        let expert = (slot / self.capacity).wrapping_sub(self.held[0]);
        let row = || (expert * self.groups + group) * self.rows + slot % self.capacity;
        (expert < self.held[1]).then(row)
    }

    /// The (token, choice) at each of these rows of dispatched tokens: its number, or −1.
    pub fn invert(&self, slots: &[i32], first: usize, found: &mut [i32]) {
        found.fill(-1);
        let group = self.choices.group().max(1);
        for (at, &slot) in slots.iter().enumerate() {
            if self.choices.holds(at % group)
                && let Some(row) = self.find(at / group, slot)
                && let Some(found) = found.get_mut(row.wrapping_sub(first))
            {
                *found = at as i32;
            }
        }
    }
}

/// The row of each (token, choice) in `found` times its gate, zeros where there is none. Gates are
/// empty if rows go as they are.
pub fn dispatch<T: CpuElement>(
    x: &[T],
    width: usize,
    k: usize,
    found: &[i32],
    gates: &[T::Acc],
    out: &mut [T],
) {
    for (&at, out) in found.iter().zip(out.chunks_exact_mut(width.max(1))) {
        let Ok(at) = usize::try_from(at) else {
            out.fill(T::default());
            continue;
        };
        let row = &x[at / k * width..][..width];
        match gates.get(at) {
            None => out.copy_from_slice(row),
            Some(&gate) => vectorized(inlined!(|| scaled(row, gate, out))),
        }
    }
}

/// The sum of the rows at the places of each token, times their gates, which are empty if rows come
/// as they are. `slots` are those of the tokens from number `first` on.
pub fn combine<T: CpuElement>(
    y: &[T],
    width: usize,
    cells: &Cells,
    slots: &[i32],
    gates: &[T::Acc],
    first: usize,
    out: &mut [T],
) {
    const BLOCK: usize = 64;
    let [k, valid] = cells.choices.k;
    for (token, (slots, out)) in
        slots.chunks_exact(k).zip(out.chunks_exact_mut(width.max(1))).enumerate()
    {
        let group = (first + token) / cells.choices.tokens[0];
        for (block, out) in out.chunks_mut(BLOCK).enumerate() {
            let mut sum = [T::Acc::ZERO; BLOCK];
            for (choice, &slot) in slots[..valid].iter().enumerate() {
                let Some(row) = cells.find(group, slot) else { continue };
                let y = &y[row * width + block * BLOCK..][..out.len()];
                let gate = gates.get(token * k + choice).copied().unwrap_or(T::Acc::ONE);
                let sum = &mut sum;
                vectorized(inlined!(|| add_scaled(y, gate, sum)));
            }
            for (out, sum) in out.iter_mut().zip(sum) {
                *out = T::store(sum);
            }
        }
    }
}

/// The product of each token's row with the row at each of its places, over the `valid` elements of
/// a row.
pub fn gate_grad<T: CpuElement>(
    rows: &[T],
    y: &[T],
    [width, valid]: [usize; 2],
    cells: &Cells,
    slots: &[i32],
    first: usize,
    out: &mut [T::Acc],
) {
    let k = cells.choices.k[0];
    for (at, (&slot, out)) in slots.iter().zip(out).enumerate() {
        let group = (first + at / k) / cells.choices.tokens[0];
        *out = T::Acc::ZERO;
        let Some(row) = cells.find(group, slot) else { continue };
        let (a, b) = (&rows[at / k * width..][..valid], &y[row * width..][..valid]);
        *out = vectorized(inlined!(|| row::dot(a, b)));
    }
}

#[inline(always)]
fn scaled<T: CpuElement>(x: &[T], gate: T::Acc, out: &mut [T]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = T::store(x.load() * gate);
    }
}

#[inline(always)]
fn add_scaled<T: CpuElement>(y: &[T], gate: T::Acc, sum: &mut [T::Acc]) {
    for (sum, y) in sum.iter_mut().zip(y) {
        *sum += y.load() * gate;
    }
}
