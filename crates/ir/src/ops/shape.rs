//! Ops that move elements without computing: reshape, transpose, slice, pad, concatenate.

use super::{OpDef, Shaped};
use crate::attr::Attrs;
use crate::error::IrError;
use crate::rule::{Dim, Factor, FactorKind, Rule};
use crate::types::TensorType;
use crate::vjp::Vjp;

/// The same elements in row-major order under another shape. Costs nothing.
#[derive(Clone, PartialEq, Debug)]
pub struct Reshape {
    /// The result's shape.
    pub shape: Vec<usize>,
}

/// A permutation of dims: result dim `i` is operand dim `perm[i]`.
#[derive(Clone, PartialEq, Debug)]
pub struct Transpose {
    /// Which operand dim each result dim is.
    pub perm: Vec<usize>,
}

/// `len` elements of one dim, from `start`.
#[derive(Clone, PartialEq, Debug)]
pub struct Slice {
    /// The dim.
    pub dim: usize,
    /// The first element kept.
    pub start: usize,
    /// How many are kept.
    pub len: usize,
}

/// Zeros before and after the elements of one dim.
#[derive(Clone, PartialEq, Debug)]
pub struct Pad {
    /// The dim.
    pub dim: usize,
    /// Zeros before.
    pub before: usize,
    /// Zeros after.
    pub after: usize,
}

/// Operands one after the other along a dim.
#[derive(Clone, PartialEq, Debug)]
pub struct Concat {
    /// The dim.
    pub dim: usize,
}

impl OpDef for Reshape {
    fn name(&self) -> &'static str {
        "reshape"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().list("shape", &self.shape)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        let elements = ins[0].elements();
        if super::product(&self.shape) != Some(elements) {
            return Err(format!(
                "{} has {elements} elements, the shape {:?} has another number of them",
                ins[0], self.shape
            ));
        }
        // Elements of dims that share no cut with the result's change places, their padding too.
        let rule = common_factors(&ins[0].shape, &self.shape);
        let whole = |dim: &Dim| dim.iter().any(|&f| rule.factors[f].kind == FactorKind::Whole);
        let padded = |dim: usize| ins[0].padded()[dim] != ins[0].shape[dim];
        let dims = rule.inputs[0].iter().enumerate();
        if let Some((dim, _)) =
            dims.into_iter().find(|&(dim, factors)| whole(factors) && padded(dim))
        {
            let shape = &self.shape;
            return Err(format!("dim {dim} of {} is padded and has no part in {shape:?}", ins[0]));
        }
        Ok(vec![(ins[0].dtype, self.shape.clone())])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        common_factors(ins[0], outs[0]).linear(&[&[0]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let shape = g.ty(g.input(0)).shape.clone();
        let dx = g.emit(Reshape { shape }, &[g.dy()?])?;
        g.set(0, dx)
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }
}

/// Cuts both shapes into common factors, so that shards flow through a reshape: `[h·d] → [h, d]`
/// has the factors h and d. Where the dims share no cut, the factors are whole.
fn common_factors(a: &[usize], b: &[usize]) -> Rule {
    let mut cut =
        Cut { factors: Vec::new(), sides: [vec![Vec::new(); a.len()], vec![Vec::new(); b.len()]] };
    let (mut i, mut j) = (0, 0);
    if a.contains(&0) || b.contains(&0) {
        // Without elements there is nothing to shard, and products say nothing about cuts.
        cut.whole(a, 0, b, 0);
        (i, j) = (a.len(), b.len());
    }
    while i < a.len() || j < b.len() {
        // Take whole dims from both sides until their products agree, then cut that group.
        let (i0, j0) = (i, j);
        let (mut left, mut right) = (1, 1);
        loop {
            if (left <= right && i < a.len()) || j == b.len() {
                left *= a[i];
                i += 1;
            } else {
                right *= b[j];
                j += 1;
            }
            if left == right && !(i < a.len() && a[i] == 1) && !(j < b.len() && b[j] == 1) {
                break;
            }
        }
        cut.group(&a[i0..i], i0, &b[j0..j], j0);
    }
    let [inputs, outputs] = cut.sides;
    Rule {
        factors: cut.factors,
        inputs: vec![inputs],
        outputs: vec![outputs],
        linear: Vec::new(),
        addends: Vec::new(),
    }
}

struct Cut {
    factors: Vec<Factor>,
    sides: [Vec<Dim>; 2],
}

impl Cut {
    fn factor(&mut self, size: usize, kind: FactorKind) -> usize {
        self.factors.push(Factor { name: format!("f{}", self.factors.len()), size, kind });
        self.factors.len() - 1
    }

    /// Cuts two runs of dims with equal products, `a` from dim `i` and `b` from dim `j`.
    fn group(&mut self, a: &[usize], i: usize, b: &[usize], j: usize) {
        match refine(a, b) {
            Some(sizes) => {
                for (size, da, db) in sizes {
                    let factor = self.factor(size, FactorKind::Free);
                    self.sides[0][i + da].push(factor);
                    self.sides[1][j + db].push(factor);
                }
            }
            None => self.whole(a, i, b, j),
        }
    }

    /// Gives each dim of two runs a factor of its own, which is never sharded.
    fn whole(&mut self, a: &[usize], i: usize, b: &[usize], j: usize) {
        for (side, dims, at) in [(0, a, i), (1, b, j)] {
            for (k, &size) in dims.iter().enumerate() {
                let factor = self.factor(size, FactorKind::Whole);
                self.sides[side][at + k].push(factor);
            }
        }
    }
}

/// The common refinement of two shapes with equal products, as (size, dim of a, dim of b), or
/// nothing if a cut of one falls inside an indivisible part of the other.
fn refine(a: &[usize], b: &[usize]) -> Option<Vec<(usize, usize, usize)>> {
    let mut out = Vec::new();
    let (mut i, mut j) = (0, 0);
    let (mut left, mut right) = (*a.first()?, *b.first()?);
    loop {
        // The parts nearest the end of memory are minor; walk major to minor and take the smaller.
        if left == right {
            out.push((left, i, j));
            (i, j) = (i + 1, j + 1);
            match (a.get(i), b.get(j)) {
                (Some(&x), Some(&y)) => (left, right) = (x, y),
                (None, None) => return Some(out),
                _ => return None,
            }
        } else if left < right && right.is_multiple_of(left) {
            out.push((left, i, j));
            right /= left;
            i += 1;
            left = *a.get(i)?;
        } else if right < left && left.is_multiple_of(right) {
            out.push((right, i, j));
            left /= right;
            j += 1;
            right = *b.get(j)?;
        } else {
            return None;
        }
    }
}

impl OpDef for Transpose {
    fn name(&self) -> &'static str {
        "transpose"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().list("perm", &self.perm)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        let mut sorted = self.perm.clone();
        sorted.sort_unstable();
        if sorted != (0..ins[0].shape.len()).collect::<Vec<_>>() {
            return Err(format!("{:?} is not a permutation of the dims of {}", self.perm, ins[0]));
        }
        Ok(vec![(ins[0].dtype, self.perm.iter().map(|&p| ins[0].shape[p]).collect())])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let names = |ids: &mut dyn Iterator<Item = usize>| {
            ids.map(|i| format!("x{i}")).collect::<Vec<_>>().join(" ")
        };
        let left = names(&mut (0..self.perm.len()));
        let right = names(&mut self.perm.iter().copied());
        Rule::declare(&format!("{left} -> {right}"), ins, outs).linear(&[&[0]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let mut perm = vec![0; self.perm.len()];
        for (i, &p) in self.perm.iter().enumerate() {
            perm[p] = i;
        }
        let dx = g.emit(Transpose { perm }, &[g.dy()?])?;
        g.set(0, dx)
    }
}

/// The rule of an op that treats all dims alike but one, of which it needs every element. That
/// dim has another extent in the result than in the operands.
fn along(dim: usize, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
    let side = |prefix: &str, rank: usize| {
        let name = |i| {
            if i == dim { format!("{prefix}{i}") } else { format!("x{i}") }
        };
        (0..rank).map(name).collect::<Vec<_>>().join(" ")
    };
    let left: Vec<String> =
        ins.iter().enumerate().map(|(k, s)| side(&format!("i{k}_"), s.len())).collect();
    let right = side("o", outs[0].len());
    let whole: Vec<String> = (0..ins.len()).map(|k| format!("i{k}_{dim}")).collect();
    let all: Vec<usize> = (0..ins.len()).collect();
    Rule::declare(&format!("{} -> {right}", left.join(", ")), ins, outs)
        .whole(&format!("{} o{dim}", whole.join(" ")))
        .linear(&[&all])
}

impl OpDef for Slice {
    fn name(&self) -> &'static str {
        "slice"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("dim", self.dim).with("start", self.start).with("len", self.len)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        let mut shape = ins[0].shape.clone();
        match shape.get_mut(self.dim) {
            Some(size) if self.start <= *size && self.len <= *size - self.start => *size = self.len,
            _ => {
                return Err(format!(
                    "{} elements from {} of dim {} are not all in {}",
                    self.len, self.start, self.dim, ins[0]
                ));
            }
        }
        Ok(vec![(ins[0].dtype, shape)])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        along(self.dim, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let size = g.ty(g.input(0)).shape[self.dim];
        let after = size - self.start - self.len;
        let dx = g.emit(Pad { dim: self.dim, before: self.start, after }, &[g.dy()?])?;
        g.set(0, dx)
    }
}

impl OpDef for Pad {
    fn name(&self) -> &'static str {
        "pad"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("dim", self.dim).with("before", self.before).with("after", self.after)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 1)?;
        let mut shape = ins[0].shape.clone();
        let size = shape.get_mut(self.dim).ok_or(format!("{} has no dim {}", ins[0], self.dim))?;
        *size = (size.checked_add(self.before))
            .and_then(|n| n.checked_add(self.after))
            .ok_or_else(|| format!("{} and {} zeros are too many", self.before, self.after))?;
        Ok(vec![(ins[0].dtype, shape)])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        along(self.dim, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let len = g.ty(g.input(0)).shape[self.dim];
        let dx = g.emit(Slice { dim: self.dim, start: self.before, len }, &[g.dy()?])?;
        g.set(0, dx)
    }
}

impl OpDef for Concat {
    fn name(&self) -> &'static str {
        "concat"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("dim", self.dim)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        let first = ins.first().ok_or("takes at least one operand")?;
        let mut shape = first.shape.clone();
        if self.dim >= shape.len() {
            return Err(format!("{first} has no dim {}", self.dim));
        }
        for other in &ins[1..] {
            let fits = other.dtype == first.dtype
                && other.shape.len() == shape.len()
                && (0..shape.len()).all(|i| i == self.dim || other.shape[i] == shape[i]);
            if !fits {
                return Err(format!("{other} does not continue {first} along dim {}", self.dim));
            }
            shape[self.dim] = (shape[self.dim].checked_add(other.shape[self.dim]))
                .ok_or_else(|| format!("dim {} would be too long", self.dim))?;
        }
        Ok(vec![(first.dtype, shape)])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        along(self.dim, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let mut start = 0;
        for i in 0..g.inputs() {
            let len = g.ty(g.input(i)).shape[self.dim];
            if g.wants(i) {
                let dx = g.emit(Slice { dim: self.dim, start, len }, &[g.dy()?])?;
                g.set(i, dx)?;
            }
            start += len;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::layout::Layout;
    use crate::mesh::Mesh;
    use crate::rule::RuleError;

    fn through(
        from: &[usize],
        to: &[usize],
        layout: &str,
        mesh: &str,
    ) -> Result<String, RuleError> {
        let mesh: Mesh = mesh.parse().unwrap();
        let rule = Reshape { shape: to.to_vec() }.rule(&[from], &[to]);
        let layout = Layout::parse(layout, from.len(), &mesh).unwrap();
        let operand = TensorType::new(DType::F32, from).with_layout(layout);
        Ok(rule.infer(&mesh, &[&operand])?[0].0.to_string())
    }

    #[test]
    fn shards_flow_through_reshapes_on_the_major_factor() {
        assert_eq!(
            through(&[8, 16, 32], &[8, 16, 4, 8], "0:dp 2:tp", "dp=2 tp=4").unwrap(),
            "{0:dp 2:tp}"
        );
        assert_eq!(through(&[8, 16, 4, 8], &[8, 16, 32], "2:tp", "tp=4").unwrap(), "{2:tp}");
        assert_eq!(through(&[8, 16], &[128], "0:dp", "dp=2").unwrap(), "{0:dp}");
        assert_eq!(through(&[1, 6], &[6, 1], "", "dp=2").unwrap(), "{}");
    }

    #[test]
    fn shapes_without_elements_reshape() {
        for (from, to) in [(&[0][..], &[0, 5][..]), (&[0, 5], &[0]), (&[3, 0], &[0, 7])] {
            assert_eq!(through(from, to, "", "dp=2").unwrap(), "{}");
        }
    }

    #[test]
    fn a_cut_inside_a_dim_keeps_it_whole() {
        assert!(through(&[6], &[2, 3], "0:a", "a=2").is_ok());
        let error = through(&[4, 6], &[6, 4], "0:a", "a=2").unwrap_err();
        assert!(matches!(error, RuleError::Whole { .. }), "{error:?}");
    }

    #[test]
    fn padding_passes_where_it_stays_at_the_end() {
        let mesh: Mesh = "a=2".parse().unwrap();
        let of = |text: &str, to: &[usize]| {
            let ty = TensorType::parse(text, &mesh).unwrap();
            let op = Reshape { shape: to.to_vec() };
            let shaped = op.infer(&[&ty])?;
            let rule = op.rule(&[&ty.shape], &[&shaped[0].1]);
            let mut results = rule.infer(&mesh, &[&ty]).map_err(|e| format!("{e:?}"))?;
            Ok::<Vec<usize>, String>(results.remove(0).1)
        };
        assert_eq!(of("f32[3~4,4]{0:a}", &[12]).unwrap(), [16]);
        assert_eq!(of("f32[2,12~16]{1:a}", &[2, 3, 4]).unwrap(), [2, 4, 4]);
        assert!(of("f32[4,3~4]", &[12]).unwrap_err().contains("MinorPadding"));
        let error = of("f32[4,9~10]{1:a}", &[6, 6]).unwrap_err();
        assert!(error.contains("dim 1 of f32[4,9~10]{1:a} is padded"), "{error}");
    }
}
