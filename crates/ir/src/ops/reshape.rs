//! Reshape: the same memory with another shape, and how shards pass through it.

use super::{OpDef, Shaped};
use crate::attr::Attrs;
use crate::error::IrError;
use crate::rule::{Dim, Factor, FactorKind, Rule};
use crate::types::TensorType;
use crate::vjp::Vjp;

/// The same elements in row-major order with another shape. It is free.
#[derive(Clone, PartialEq, Debug)]
pub struct Reshape {
    /// The result's shape.
    pub shape: Vec<usize>,
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
                "{} has {elements} elements, but the shape {:?} has a different number",
                ins[0], self.shape
            ));
        }
        // Elements of dims without a common factor with the result's dims move to other places, and
        // so does their padding.
        let rule = common_factors(&ins[0].shape, &self.shape);
        let whole = |dim: &Dim| dim.iter().any(|&f| rule.factors[f].kind == FactorKind::Whole);
        let padded = |dim: usize| ins[0].padded()[dim] != ins[0].shape[dim];
        let mut dims = rule.inputs[0].iter().enumerate();
        if let Some((dim, _)) = dims.find(|&(dim, factors)| whole(factors) && padded(dim)) {
            let shape = &self.shape;
            return Err(format!(
                "dim {dim} of {} is padded and has no common factor with {shape:?}",
                ins[0]
            ));
        }
        Ok(vec![(ins[0].dtype, self.shape.clone())])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        common_factors(ins[0], outs[0]).linear(&[&[0]])
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let shape = g.ty(g.input(0)).shape.clone();
        g.set_to(0, Reshape { shape }, &[g.dy()?])
    }

    fn is_view(&self) -> bool {
        true
    }
}

/// Splits both shapes into common factors, so that shards pass through a reshape: `[h·d] → [h, d]`
/// has the factors h and d. Dims without common factors cannot be sharded.
fn common_factors(a: &[usize], b: &[usize]) -> Rule {
    let mut cut =
        Cut { factors: Vec::new(), sides: [vec![Vec::new(); a.len()], vec![Vec::new(); b.len()]] };
    let (mut i, mut j) = (0, 0);
    if a.contains(&0) || b.contains(&0) {
        // Without elements there is nothing to shard, and products do not determine factors.
        cut.whole(a, 0, b, 0);
        (i, j) = (a.len(), b.len());
    }
    while i < a.len() || j < b.len() {
        // Take whole dims from both sides until their products are equal, then split that group.
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
        let name = format!("f{}", self.factors.len());
        self.factors.push(Factor { name, size, kind, in_blocks: false });
        self.factors.len() - 1
    }

    /// Splits two runs of dims with equal products, `a` from dim `i` and `b` from dim `j`.
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

    /// Gives each dim of two runs its own factor, which is never sharded.
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
/// `None` if they have no common factors.
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
                // Dims of one element may be left over on either side; the products are equal.
                _ => {
                    out.extend((i..a.len()).map(|rest| (1, rest, b.len() - 1)));
                    out.extend((j..b.len()).map(|rest| (1, a.len() - 1, rest)));
                    return Some(out);
                }
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
        // Dims of one element, such as a single head, do not matter.
        assert_eq!(through(&[8, 16, 1, 4], &[8, 16, 4], "1:cp", "cp=2").unwrap(), "{1:cp}");
        assert_eq!(through(&[8, 16, 4], &[8, 16, 1, 4], "1:cp", "cp=2").unwrap(), "{1:cp}");
        assert_eq!(through(&[6, 1, 1], &[1, 6], "0:cp", "cp=2").unwrap(), "{1:cp}");
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
