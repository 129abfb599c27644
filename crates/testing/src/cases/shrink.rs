//! Smaller cases of one that fails: steps, requests, axes and elements are removed one by one.

use phalanx_ir::Mesh;

use super::IDS;
use super::recipe::Recipe;

/// How many smaller cases are tried at most.
const MOST_TRIES: usize = 3000;

/// The smallest recipe that still fails, found by removing one thing at a time.
///
/// `fails` returns the recipe that failed (it may change the chooser) with the result to report.
pub(super) fn shrunk<T>(
    first: (Recipe, T),
    mut fails: impl FnMut(Recipe) -> Option<(Recipe, T)>,
) -> (Recipe, T) {
    let mut smallest = first;
    let mut tries = 0;
    loop {
        let candidates = smallest.0.smaller();
        let found = candidates.into_iter().find_map(|candidate| {
            tries += 1;
            if tries > MOST_TRIES { None } else { fails(candidate) }
        });
        match found {
            Some(found) => smallest = found,
            None => return smallest,
        }
    }
}

impl Recipe {
    /// Recipes that each have something less, those with much less first.
    fn smaller(&self) -> Vec<Self> {
        let mut all = Vec::new();
        for steps in fewer(&self.steps) {
            all.push(Self { steps, ..self.clone() });
        }
        for mesh in smaller_meshes(&self.mesh) {
            all.push(Self { mesh, ..self.clone() });
        }
        for wishes in fewer(&self.wishes) {
            all.push(Self { wishes, ..self.clone() });
        }
        if self.vocabulary.is_some() {
            all.push(Self { vocabulary: None, ..self.clone() });
        }
        if !self.orders.is_empty() {
            all.push(Self { orders: Vec::new(), ..self.clone() });
        }
        if self.loss {
            all.push(Self { loss: false, ..self.clone() });
        }
        if self.vocabulary.is_some_and(|size| size > IDS) {
            all.push(Self { vocabulary: Some(IDS), ..self.clone() });
        }
        for (dim, &size) in self.sizes.iter().enumerate() {
            for less in [2, size / 2, size - 1].into_iter().filter(|&less| less > 1 && less < size)
            {
                let mut sizes = self.sizes;
                sizes[dim] = less;
                all.push(Self { sizes, ..self.clone() });
            }
        }
        for steps in without_rows(&self.steps) {
            all.push(Self { steps, ..self.clone() });
        }
        all
    }
}

/// A list without two or more items in a row, for every such row, the longest first. A step reads
/// one of the values just before it, so sometimes two neighbours can be removed although neither
/// can be removed alone.
fn without_rows<T: Clone>(items: &[T]) -> Vec<Vec<T>> {
    let rows = (2..=items.len()).rev();
    rows.flat_map(|row| (0..=items.len() - row).rev().map(move |start| (start, start + row)))
        .map(|(start, end)| [&items[..start], &items[end..]].concat())
        .collect()
}

/// A list without all, a half, a quarter … and one of its items.
fn fewer<T: Clone>(items: &[T]) -> Vec<Vec<T>> {
    let mut all = Vec::new();
    let mut piece = items.len();
    while piece > 0 {
        for start in (0..items.len()).step_by(piece).rev() {
            let end = (start + piece).min(items.len());
            all.push([&items[..start], &items[end..]].concat());
        }
        piece /= 2;
    }
    all
}

/// Meshes without an axis, or with fewer ranks along one.
fn smaller_meshes(mesh: &Mesh) -> Vec<Mesh> {
    let axes: Vec<_> = mesh.axes().collect();
    let mut all = Vec::new();
    let mut add = |axes: &[(phalanx_ir::Axis, usize)]| {
        all.extend(Mesh::new(axes.iter().map(|(axis, n)| (axis.name(), *n))).ok());
    };
    for at in 0..axes.len() {
        let mut less = axes.clone();
        less.remove(at);
        if !less.is_empty() {
            add(&less);
        }
    }
    for at in 0..axes.len() {
        for n in [2, axes[at].1 / 2].into_iter().filter(|&n| n > 1 && n < axes[at].1) {
            let mut less = axes.clone();
            less[at].1 = n;
            add(&less);
        }
    }
    all
}
