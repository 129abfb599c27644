//! Products of packed rows with the matrix of the expert that each row belongs to (MegaBlocks: Gale et
//! al., 2022).
//!
//! Rows lie in **regions**, `[s, …, c, d]`, one behind the other without gaps. How many rows each run of
//! a region has is a value of the step: counts `i32[s, …, r]`, in the order of the rows. Run `j` is of
//! expert `j mod l`, where `l` is the number of experts of one of the `s` parts that experts are divided
//! into. What lies behind the last run of a region belongs to nobody: it is not computed, and results are
//! zero there.

use super::{OpDef, Product, Shaped};
use crate::attr::{AttrReader, Attrs};
use crate::dtype::DType;
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// Each row times the matrix of its expert: operands x `[s, …, c, d]`, weights `[e, d, f]` and counts.
/// Result `[s, …, c, f]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupedMatmul {
    /// Whether matrices are transposed: x has their columns, and the result their rows.
    pub transposed: bool,
}

/// The gradient of the matrices: operands x `[s, …, c, d]`, y `[s, …, c, f]` and counts. Result
/// `[e, d, f]`, for each expert the sum of the products of its rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GroupedMatmulGrad {
    /// How many experts there are.
    pub experts: usize,
    /// The result's element type; sums run in its accumulator type.
    pub out: DType,
}

pub(super) fn read(attrs: &mut AttrReader) -> Result<GroupedMatmul, String> {
    Ok(GroupedMatmul { transposed: attrs.take("transposed")? })
}

pub(super) fn read_grad(attrs: &mut AttrReader) -> Result<GroupedMatmulGrad, String> {
    Ok(GroupedMatmulGrad { experts: attrs.take("experts")?, out: attrs.take("out")? })
}

/// The dims of packed rows before their width, and the width.
fn packed<'a>(what: &str, x: &'a TensorType) -> Result<(&'a [usize], usize), String> {
    match x.shape[..] {
        [ref regions @ .., _, width] if !regions.is_empty() && x.dtype.is_float() => {
            Ok((&x.shape[..regions.len() + 1], width))
        }
        _ => Err(format!("{what} is {x}, expected a float of parts, regions, rows and width")),
    }
}

/// Fails unless the counts are those of rows with these dims, for so many experts.
fn counts_fit(rows: &[usize], counts: &TensorType, experts: usize) -> Result<(), String> {
    super::dtype_is("the counts", counts, DType::I32)?;
    let regions = &rows[..rows.len() - 1];
    let Some((&runs, of)) = counts.shape.split_last() else {
        return Err("the counts have no dims, expected a number for each run".to_owned());
    };
    if of != regions {
        return Err(format!("the counts are {counts}, expected runs of the regions {regions:?}"));
    }
    let parts = regions[0];
    if parts == 0 || experts == 0 || !experts.is_multiple_of(parts) {
        return Err(format!("{experts} experts in {parts} parts: they must divide evenly"));
    }
    match runs > 0 && runs.is_multiple_of(experts / parts) {
        true => Ok(()),
        false => Err(format!(
            "{runs} runs of a region, expected a multiple of its {} experts",
            experts / parts
        )),
    }
}

impl OpDef for GroupedMatmul {
    fn name(&self) -> &'static str {
        "grouped_matmul"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("transposed", self.transposed)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 3)?;
        let (x, w) = (ins[0], ins[1]);
        let (rows, width) = packed("x", x)?;
        super::dtype_is("the weights", w, x.dtype)?;
        let [experts, d, f] = w.shape[..] else {
            return Err(format!("the weights are {w}, expected a matrix for each expert"));
        };
        let (inner, outer) = if self.transposed { (f, d) } else { (d, f) };
        if inner != width {
            return Err(format!("rows of {width} do not fit the weights {w}, expected {inner}"));
        }
        counts_fit(rows, ins[2], experts)?;
        Ok(vec![(x.dtype, [rows, &[outer]].concat())])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let text = match self.transposed {
            false => "s ... c d, (s l) d f, s ... r -> s ... c f",
            true => "s ... c f, (s l) d f, s ... r -> s ... c d",
        };
        declared(text, ins, outs)
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let (dy, [x, w, counts]) = (g.dy()?, [0, 1, 2].map(|i| g.input(i)));
        g.set_to(0, Self { transposed: !self.transposed }, &[dy, w, counts])?;
        let grad = GroupedMatmulGrad { experts: g.ty(w).shape[0], out: g.dtype(1) };
        let [left, right] = if self.transposed { [dy, x] } else { [x, dy] };
        g.set_to(1, grad, &[left, right, counts])
    }

    /// As if no room were left.
    fn products(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Vec<Product> {
        vec![Product { batch: 1, rows: rows(ins[0]), cols: last(outs[0]), inner: last(ins[0]) }]
    }
}

impl OpDef for GroupedMatmulGrad {
    fn name(&self) -> &'static str {
        "grouped_matmul_grad"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("experts", self.experts).with("out", self.out)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, 3)?;
        let ((rows, d), (others, f)) = (packed("x", ins[0])?, packed("y", ins[1])?);
        super::dtype_is("y", ins[1], ins[0].dtype)?;
        if rows != others || !self.out.is_float() {
            return Err(format!("x is {} and y {}, for {}: other rows", ins[0], ins[1], self.out));
        }
        counts_fit(rows, ins[2], self.experts)?;
        Ok(vec![(self.out, vec![self.experts, d, f])])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        declared("s ... c d, s ... c f, s ... r -> (s l) d f", ins, outs)
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        Err(g.refuse(0, "second derivatives are not formed"))
    }

    /// As if no room were left.
    fn products(&self, ins: &[&[usize]], _outs: &[&[usize]]) -> Vec<Product> {
        vec![Product { batch: 1, rows: last(ins[0]), cols: last(ins[1]), inner: rows(ins[0]) }]
    }

    fn accumulates(&self, _result: usize) -> bool {
        true
    }
}

/// Rows are packed, so no rank holds a part of a region: neither of its rows, nor of its experts.
fn declared(text: &str, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
    Rule::declare(text, ins, outs).whole("c r l").linear(&[&[0], &[1]])
}

/// The width of rows.
fn last(shape: &[usize]) -> usize {
    *shape.last().expect("rows have a width")
}

/// The rows of all regions.
fn rows(shape: &[usize]) -> usize {
    shape[..shape.len().saturating_sub(1)].iter().product()
}

#[cfg(test)]
mod tests {
    use crate::{text, verify};

    fn check(lines: &str) -> Result<crate::Program, String> {
        let text = format!("mesh dp=2 ep=2 tp=2\nprogram p {{\n{lines}\n}}\n");
        let program = text::parse(&text).map_err(|e| e.to_string())?;
        verify(&program).map_err(|e| e.to_string())?;
        Ok(program)
    }

    const INPUTS: &str = "x: boundary f32[2,4,12,8]{0:ep 1:dp}
        w: param f32[6,8,10]{0:ep 2:tp}
        counts: data i32[2,4,9]{0:ep 1:dp}";

    #[test]
    fn parts_of_experts_go_with_parts_of_rows() {
        let lines = "%1 = grouped_matmul(x, w, counts, transposed=false) : f32[2,4,12,10]{0:ep 1:dp 3:tp}
            %2 = grouped_matmul(%1, w, counts, transposed=true) : f32[2,4,12,8]{0:ep 1:dp P:tp}
            %3 = grouped_matmul_grad(x, %1, counts, experts=6, out=f32) : f32[6,8,10]{0:ep 2:tp P:dp}
            return a: probe %2
            return b: gradient %3";
        let program = check(&format!("{INPUTS}\n{lines}")).unwrap();
        assert_eq!(text::parse(&program.to_string()).unwrap(), program);
        assert_eq!(program.flops(), 3 * 2 * 2 * 4 * 12 * 8 * 10);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let product =
            "grouped_matmul(x, w, counts, transposed=false) : f32[2,4,12,10]{0:ep 1:dp 3:tp}";
        for (inputs, why) in [
            (INPUTS.replace("f32[2,4,12,8]{0:ep 1:dp}", "f32[2,4,12,7]{0:ep 1:dp}"), "expected 8"),
            (INPUTS.replace("i32[2,4,9]", "i32[2,4,8]"), "a multiple of its 3 experts"),
            (
                INPUTS.replace("i32[2,4,9]{0:ep 1:dp}", "i32[2,2,9]{0:ep 1:dp}"),
                "the regions [2, 4]",
            ),
            (INPUTS.replace("f32[6,8,10]{0:ep 2:tp}", "f32[7,8,10]"), "7 experts in 2 parts"),
            // Every rank would multiply with other experts than its rows'.
            (INPUTS.replace("{0:ep 2:tp}", "{2:tp}"), "ep"),
            (INPUTS.replace("f32[2,4,12,8]{0:ep 1:dp}", "f32[2,4,12,8]{0:ep 2:dp}"), "dp"),
        ] {
            let error =
                check(&format!("{inputs}\n%1 = {product}\nreturn a: probe %1")).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
