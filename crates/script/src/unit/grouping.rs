//! Which parameters of a stage group are one unit: those of a segment instance, or as many as fill a bucket.

use std::collections::BTreeSet;
use std::ops::Range;

use phalanx_ir::Model;

use super::Described;

pub(super) type Group = (String, Vec<Described>);

/// One unit per segment instance, or per a few instances of a repeated segment, for parameters with
/// the same layout; a shared parameter belongs to the first instance that reads it.
pub(super) fn by_instance(
    model: &Model,
    params: &[Described],
    held: impl Fn(usize) -> bool,
    per_unit: usize,
) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let mut seen = BTreeSet::new();
    for run in together(model, held, per_unit) {
        let first = groups.len();
        let instance = &model.instances()[run.start];
        let own: BTreeSet<usize> =
            model.instances()[run].iter().flat_map(|i| i.params.values().copied()).collect();
        for described in params.iter().filter(|p| own.contains(&p.param)) {
            if !seen.insert(described.param) {
                continue;
            }
            // Parameters that different stage groups share are one unit in each of them, whichever
            // instances read them there.
            let from = if described.tied { 0 } else { first };
            match groups[from..].iter_mut().find(|(_, group)| group[0].alike(described)) {
                Some((_, group)) => group.push(described.clone()),
                None => groups.push((instance.name.clone(), vec![described.clone()])),
            }
        }
        // The others get their difference as a suffix, which is unique.
        for (name, group) in groups[first..].iter_mut().skip(1) {
            let cut = group[0].blocks.iter().map(|axis| format!("+cut.{axis}"));
            let summed = group[0].partial.iter().map(|axis| format!("+sum.{axis}"));
            let tied = group[0].tied.then(|| "+tied".to_owned());
            let apart = group[0].apart.map(|param| format!("+{}", model.params()[param].name));
            let suffix: String = cut.chain(summed).chain(tied).chain(apart).collect();
            *name += if suffix.is_empty() { "+whole" } else { &suffix };
        }
    }
    groups
}

/// The instances of each unit: at most `most` consecutive instances of one segment.
fn together(model: &Model, held: impl Fn(usize) -> bool, most: usize) -> Vec<Range<usize>> {
    let instances = model.instances();
    let mut runs: Vec<Range<usize>> = Vec::new();
    for number in (0..instances.len()).filter(|&number| held(number)) {
        match runs.last_mut() {
            Some(run)
                if run.end == number
                    && run.len() < most
                    && instances[run.start].segment == instances[number].segment =>
            {
                run.end = number + 1;
            }
            _ => runs.push(number..number + 1),
        }
    }
    runs
}

/// Buckets in the order in which gradients complete, the reverse of the parameters': a bucket is
/// closed once it has `cap` bytes, the one that is reduced first once it has `first`. Stages must
/// pack shared parameters in the same way, so these are one bucket of any size.
pub(super) fn buckets(params: &[Described], size: usize, first: usize, cap: usize) -> Vec<Group> {
    let mut closed: Vec<Vec<Described>> = Vec::new();
    let mut open: Vec<Vec<Described>> = Vec::new();
    for described in params.iter().rev() {
        let at = match open.iter().position(|group| group[0].alike(described)) {
            Some(at) => {
                open[at].push(described.clone());
                at
            }
            None => {
                open.push(vec![described.clone()]);
                open.len() - 1
            }
        };
        let bytes: usize = open[at].iter().map(|p| p.elements * size).sum();
        let full = bytes >= if closed.is_empty() { first } else { cap };
        if full && described.stage_groups.len() < 2 {
            closed.push(open.remove(at));
        }
    }
    closed.extend(open);
    closed.into_iter().enumerate().map(|(i, group)| (format!("bucket.{i}"), group)).collect()
}

#[cfg(test)]
mod tests {
    use phalanx_ir::Axis;
    use phalanx_ir::ops::MatrixPlace;

    use super::*;

    const MIB: usize = 1 << 20;

    fn param(param: usize, elements: usize, partial: &str) -> Described {
        let partial = partial.split_whitespace().map(|a| Axis::new(a).unwrap()).collect();
        let (blocks, stage_groups) = (vec![], vec![0]);
        let (decay, trained, tied, apart) = (true, true, false, None);
        let shape = vec![elements, 1];
        let (tile, sizes, moves) = (shape.clone(), shape, vec![vec![]; 2]);
        let matrix = MatrixPlace { begin: 0, tile, sizes, moves };
        Described {
            param,
            decay,
            trained,
            elements,
            matrix,
            blocks,
            partial,
            stage_groups,
            tied,
            apart,
        }
    }

    fn sizes(params: &[Described], first: usize, cap: usize) -> Vec<Vec<usize>> {
        let groups = buckets(params, 4, first, cap);
        groups.iter().map(|(_, group)| group.iter().map(|p| p.param).collect()).collect()
    }

    /// The rule of DDP by hand: from the last parameter back; a bucket is closed by the parameter
    /// with which it reaches its cap, so it may hold more; the first one's cap is smaller.
    #[test]
    fn buckets_close_once_they_reach_their_cap() {
        // In MiB of f32 gradients: 10, 20, 4, 30, 0.5, 0.25, 0.75.
        let mib = [10.0, 20.0, 4.0, 30.0, 0.5, 0.25, 0.75];
        let params: Vec<Described> = (mib.iter().enumerate())
            .map(|(i, mib)| param(i, (mib * MIB as f64) as usize / 4, "dp"))
            .collect();
        let expected = vec![vec![6, 5], vec![4, 3], vec![2, 1, 0]];
        assert_eq!(sizes(&params, MIB, 25 * MIB), expected);
        // Exactly the cap closes it; one element less does not.
        let exact: Vec<Described> = (0..4).map(|i| param(i, MIB / 4, "dp")).collect();
        assert_eq!(sizes(&exact, MIB, 2 * MIB), vec![vec![3], vec![2, 1], vec![0]]);
        let below: Vec<Described> = (0..4).map(|i| param(i, MIB / 4 - 1, "dp")).collect();
        assert_eq!(sizes(&below, MIB, 2 * MIB), vec![vec![3, 2], vec![1, 0]]);
    }

    #[test]
    fn what_is_summed_over_other_axes_has_buckets_of_its_own() {
        let params =
            [param(0, 8, "dp"), param(1, 8, "dp tp"), param(2, 8, "dp"), param(3, 8, "dp")];
        assert_eq!(sizes(&params, 64, 64), vec![vec![3, 2], vec![1], vec![0]]);
        let names: Vec<String> = buckets(&params, 4, 64, 64).into_iter().map(|g| g.0).collect();
        assert_eq!(names, ["bucket.0", "bucket.1", "bucket.2"]);
    }
}
