//! Matrix products that share their first operand, run as one: `a·[b0|b1|b2] = [c0|c1|c2]`.
//!
//! Query, key and value read one input; so do the gate and the other half of a gated layer; and the
//! gradients of their weights read it again. Their weights stay separate parameters, of any widths
//! and in any layouts; only the work is combined, so that an engine prepares the shared operand
//! once. Each result has the same bits as a separate product.

use super::{Matmul, OpDef, Product, Shaped, Spec};
use crate::attr::{AttrReader, Attrs};
use crate::dtype::DType;
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// Products of one tensor with several: operands a, b0, b1 and so on; a result for each b.
#[derive(Clone, PartialEq, Debug)]
pub struct PackedMatmul {
    /// The letters, the same in every product.
    pub spec: Spec,
    /// The results' element type; sums run in its accumulator type.
    pub out: DType,
}

impl PackedMatmul {
    /// One of the products alone.
    pub fn single(&self) -> Matmul {
        Matmul { spec: self.spec.clone(), out: self.out, add: false }
    }
}

pub(super) fn read(attrs: &mut AttrReader) -> Result<PackedMatmul, String> {
    Ok(PackedMatmul { spec: attrs.take("spec")?, out: attrs.take("out")? })
}

impl OpDef for PackedMatmul {
    fn name(&self) -> &'static str {
        "packed_matmul"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("spec", &self.spec).with("out", self.out)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        let [a, others @ ..] = ins else {
            return Err("takes a shared operand and at least two others, got none".to_owned());
        };
        if others.len() < 2 {
            return Err(format!("takes at least 3 operands, got {}", ins.len()));
        }
        let one = |b: &&TensorType| Ok(self.single().infer(&[a, b])?.swap_remove(0));
        others.iter().map(one).collect()
    }

    /// Each product has its own columns; all other letters are common.
    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let cols = self.spec.extents().cols;
        let [a, b, out] = self.spec.letters();
        let name = |c: char, product: usize| match cols.contains(&c) {
            true => format!("{c}{product}"),
            false => c.to_string(),
        };
        let named = |letters: &str, product: usize| {
            letters.chars().map(|c| name(c, product)).collect::<Vec<_>>().join(" ")
        };
        let all = |letters: &str| {
            (0..outs.len()).map(|product| named(letters, product)).collect::<Vec<_>>().join(", ")
        };
        let text = format!("{}, {} -> {}", named(a, 0), all(b), all(out));
        let others: Vec<usize> = (1..ins.len()).collect();
        let rule = Rule::declare(&text, ins, outs).linear(&[&[0], &others]);
        let own: String = cols.iter().collect();
        (0..outs.len()).fold(rule, |rule, product| rule.branch(product, &named(&own, product)))
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "products are packed after gradients"))
    }

    fn products(&self, ins: &[&[usize]], _outs: &[&[usize]]) -> Vec<Product> {
        ins[1..].iter().map(|b| self.spec.product(ins[0], b)).collect()
    }

    fn accumulates(&self, _result: usize) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use crate::{text, verify};

    fn check(mesh: &str, lines: &str) -> Result<crate::Program, String> {
        let program = text::parse(&format!("mesh {mesh}\nprogram p {{\n{lines}\n}}\n"))
            .map_err(|e| e.to_string())?;
        verify(&program).map_err(|e| e.to_string())?;
        Ok(program)
    }

    #[test]
    fn widths_and_layouts_of_columns_are_each_products_own() {
        let program = check(
            "dp=2 tp=2",
            "x: boundary f32[4,6,8]{0:dp}
             q: param f32[8,12]{1:tp}
             k: param f32[8,4]
             v: param f32[8,2]{1:tp}
             %1, %2, %3 = packed_matmul(x, q, k, v, spec=bsd,de->bse, out=f32) : f32[4,6,12]{0:dp 2:tp}, f32[4,6,4]{0:dp}, f32[4,6,2]{0:dp 2:tp}
             return a: probe %1
             return b: probe %2
             return c: probe %3",
        )
        .unwrap();
        assert_eq!(program.flops(), 2 * 4 * 6 * 8 * (12 + 4 + 2));
        assert_eq!(text::parse(&program.to_string()).unwrap(), program);
    }

    #[test]
    fn an_axis_of_common_letters_is_no_axis_of_columns() {
        let error = check(
            "dp=2",
            "x: boundary f32[4,8]{0:dp}
             y: param f32[8,6]
             z: param f32[8,2]{1:dp}
             %1, %2 = packed_matmul(x, y, z, spec=rd,de->re, out=f32) : f32[4,6]{0:dp}, f32[4,2]{0:dp}
             return a: probe %1
             return b: probe %2",
        )
        .unwrap_err();
        assert!(error.contains("`dp`") && error.contains("e1"), "{error}");
    }

    #[test]
    fn summed_letters_are_common_and_leave_partial_sums() {
        let packed = |layout: &str| {
            let lines = format!(
                "x: boundary f32[4,8]{{0:dp}}
                 y: boundary f32[4,6]{{0:dp}}
                 z: boundary f32[4,2]{{0:dp}}
                 %1, %2 = packed_matmul(x, y, z, spec=rd,re->de, out=f32) : f32[8,6]{{P:dp}}, f32[8,2]{layout}
                 return a: gradient %1
                 return b: gradient %2"
            );
            check("dp=2", &lines)
        };
        packed("{P:dp}").unwrap();
        packed("").unwrap_err();
    }

    #[test]
    fn partial_operands_are_partial_together() {
        let packed = |layout: &str| {
            let lines = format!(
                "x: boundary f32[4,8]
                 y: param f32[8,6]{{P:tp}}
                 z: param f32[8,2]{layout}
                 %1, %2 = packed_matmul(x, y, z, spec=rd,de->re, out=f32) : f32[4,6]{{P:tp}}, f32[4,2]{layout}
                 return a: probe %1
                 return b: probe %2"
            );
            check("tp=2", &lines)
        };
        packed("{P:tp}").unwrap();
        packed("").unwrap_err();
    }

    #[test]
    fn a_pack_of_one_is_refused() {
        let lines = "x: boundary f32[4,8]
            y: param f32[8,6]
            %1 = packed_matmul(x, y, spec=rd,de->re, out=f32) : f32[4,6]
            return a: probe %1";
        let error = check("", lines).unwrap_err();
        assert!(error.contains("at least 3 operands, got 2"), "{error}");
    }
}
