//! Matrix products of any arrangement: a contraction of two tensors, named by letters.

use std::fmt;
use std::str::FromStr;

use super::{Cast, OpDef, Shaped};
use crate::attr::{AttrReader, Attrs};
use crate::dtype::DType;
use crate::error::IrError;
use crate::rule::Rule;
use crate::types::TensorType;
use crate::vjp::Vjp;

/// `bsd,de->bse`: the letters of both operands and of the result. A letter of the result is in one
/// operand (rows or columns) or in both (batch); a letter that is not in the result is in both
/// operands (contracted). Transposes are written with letters and need no copies.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Spec {
    a: String,
    b: String,
    out: String,
}

/// The letters of a product by their role, in the order of their first operand.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Extents {
    /// In both operands and the result.
    pub batch: Vec<char>,
    /// In the first operand and the result.
    pub rows: Vec<char>,
    /// In the second operand and the result.
    pub cols: Vec<char>,
    /// In both operands only.
    pub inner: Vec<char>,
}

/// The sides of a matrix product: `batch` times `[rows, inner] · [inner, cols]`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Product {
    /// How many there are.
    pub batch: usize,
    /// Rows of the result.
    pub rows: usize,
    /// Columns of the result.
    pub cols: usize,
    /// What is summed over.
    pub inner: usize,
}

impl Product {
    /// Multiplications and additions.
    pub fn flops(&self) -> u64 {
        let sides = [self.batch, self.rows, self.cols, self.inner];
        2 * sides.iter().map(|&side| side as u64).product::<u64>()
    }
}

impl Spec {
    /// The letters of operand 0, operand 1 and the result.
    pub fn letters(&self) -> [&str; 3] {
        [&self.a, &self.b, &self.out]
    }

    /// The gradient with respect to operand 0: `out,b->a`.
    pub fn grad_a(&self) -> Self {
        Self { a: self.out.clone(), b: self.b.clone(), out: self.a.clone() }
    }

    /// The gradient with respect to operand 1: `a,out->b`.
    pub fn grad_b(&self) -> Self {
        Self { a: self.a.clone(), b: self.out.clone(), out: self.b.clone() }
    }

    /// The letters by their role.
    pub fn extents(&self) -> Extents {
        let has = |s: &str, c: char| s.contains(c);
        let pick = |s: &str, f: &dyn Fn(char) -> bool| s.chars().filter(|&c| f(c)).collect();
        Extents {
            batch: pick(&self.a, &|c| has(&self.b, c) && has(&self.out, c)),
            rows: pick(&self.a, &|c| !has(&self.b, c)),
            cols: pick(&self.b, &|c| !has(&self.a, c)),
            inner: pick(&self.a, &|c| !has(&self.out, c)),
        }
    }

    /// The product of two operands of these shapes.
    pub fn product(&self, a: &[usize], b: &[usize]) -> Product {
        let Extents { batch, rows, cols, inner } = self.extents();
        let all = |letters: &[char]| letters.iter().map(|&c| self.size(c, a, b)).product();
        Product { batch: all(&batch), rows: all(&rows), cols: all(&cols), inner: all(&inner) }
    }

    /// The size of a letter, from the operand that has it.
    ///
    /// # Panics
    /// If no operand has it.
    pub fn size(&self, letter: char, a: &[usize], b: &[usize]) -> usize {
        match (self.a.find(letter), self.b.find(letter)) {
            (Some(i), _) => a[i],
            (None, Some(i)) => b[i],
            (None, None) => panic!("`{letter}` is in no operand of {self}"),
        }
    }
}

impl FromStr for Spec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = |why: &str| format!("`{text}` is not a product such as bsd,de->bse: {why}");
        let (left, out) = text.split_once("->").ok_or_else(|| bad("no `->`"))?;
        let (a, b) = left.split_once(',').ok_or_else(|| bad("no `,`"))?;
        for operand in [a, b, out] {
            let unique = operand.char_indices().all(|(i, c)| !operand[..i].contains(c));
            if !unique || !operand.chars().all(|c| c.is_ascii_lowercase()) {
                return Err(bad("each operand needs distinct lower-case letters"));
            }
        }
        for c in a.chars().chain(b.chars()).chain(out.chars()) {
            if [a, b, out].iter().filter(|s| s.contains(c)).count() < 2 {
                return Err(bad(&format!("`{c}` appears only once; sum or broadcast it instead")));
            }
        }
        Ok(Self { a: a.to_owned(), b: b.to_owned(), out: out.to_owned() })
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}->{}", self.a, self.b, self.out)
    }
}

/// A product of two tensors, optionally added to a third: operands a, b and, if `add`, c.
#[derive(Clone, PartialEq, Debug)]
pub struct Matmul {
    /// The letters of operands and result.
    pub spec: Spec,
    /// The result's element type; sums run in its accumulator type.
    pub out: DType,
    /// Whether a third operand of the result's type is added.
    pub add: bool,
}

pub(super) fn read(attrs: &mut AttrReader) -> Result<Matmul, String> {
    Ok(Matmul { spec: attrs.take("spec")?, out: attrs.take("out")?, add: attrs.take("add")? })
}

impl OpDef for Matmul {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("spec", &self.spec).with("out", self.out).with("add", self.add)
    }

    fn infer(&self, ins: &[&TensorType]) -> Result<Vec<Shaped>, String> {
        super::arity(ins, if self.add { 3 } else { 2 })?;
        let (a, b) = (ins[0], ins[1]);
        if a.dtype != b.dtype || !a.dtype.is_float() {
            return Err(format!("operands are {a} and {b}; both must have one float type"));
        }
        for (letters, ty) in [(&self.spec.a, a), (&self.spec.b, b)] {
            if letters.len() != ty.shape.len() {
                return Err(format!("`{letters}` of {} does not name the dims of {ty}", self.spec));
            }
        }
        for c in self.spec.a.chars() {
            let (i, j) = (self.spec.a.find(c), self.spec.b.find(c));
            if let (Some(i), Some(j)) = (i, j)
                && a.shape[i] != b.shape[j]
            {
                return Err(format!(
                    "`{c}` of {} is {} in {a} and {} in {b}",
                    self.spec, a.shape[i], b.shape[j]
                ));
            }
        }
        let shape: Vec<usize> =
            self.spec.out.chars().map(|c| self.spec.size(c, &a.shape, &b.shape)).collect();
        if let Some(c) = ins.get(2) {
            super::dtype_is("the addend", c, self.out)?;
            super::shape_is("the addend", c, &shape)?;
        }
        Ok(vec![(self.out, shape)])
    }

    fn rule(&self, ins: &[&[usize]], outs: &[&[usize]]) -> Rule {
        let spaced = |s: &str| s.chars().map(String::from).collect::<Vec<_>>().join(" ");
        let (a, b, out) = (spaced(&self.spec.a), spaced(&self.spec.b), spaced(&self.spec.out));
        let addend = if self.add { format!(", {out}") } else { String::new() };
        let mut rule =
            Rule::declare(&format!("{a}, {b}{addend} -> {out}"), ins, outs).linear(&[&[0], &[1]]);
        if self.add {
            rule.addends = vec![(2, 0)];
        }
        rule
    }

    fn vjp(&self, g: &mut Vjp<'_>) -> Result<(), IrError> {
        let sum = g.dy()?;
        // If the result is wider than the operands, its cotangent is cast to their type.
        let mut dy = sum;
        let operand = g.ty(g.input(0)).dtype;
        if operand != self.out && (g.wants(0) || g.wants(1)) {
            dy = g.emit(Cast { to: operand }, &[dy])?;
        }
        let product = |spec, out| Matmul { spec, out, add: false };
        g.set_to(0, product(self.spec.grad_a(), g.dtype(0)), &[dy, g.input(1)])?;
        g.set_to(1, product(self.spec.grad_b(), g.dtype(1)), &[g.input(0), dy])?;
        if self.add { g.set(2, sum) } else { Ok(()) }
    }

    fn products(&self, ins: &[&[usize]], _outs: &[&[usize]]) -> Vec<Product> {
        vec![self.spec.product(ins[0], ins[1])]
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(2, 0)]
    }
    fn accumulates(&self, _result: usize) -> bool {
        !self.add
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_sort_into_roles() {
        let spec: Spec = "bshd,bthd->bhst".parse().unwrap();
        let e = spec.extents();
        assert_eq!(
            (e.batch, e.rows, e.cols, e.inner),
            (vec!['b', 'h'], vec!['s'], vec!['t'], vec!['d'])
        );
        assert_eq!(spec.grad_a().to_string(), "bhst,bthd->bshd");
        assert_eq!(spec.grad_b().to_string(), "bshd,bhst->bthd");
    }

    #[test]
    fn impossible_products_are_refused() {
        for text in ["ab,bc", "abbc->ac", "ab,bc->ad", "aab,bc->ac", "ab,cd->ad"] {
            assert!(text.parse::<Spec>().is_err(), "{text}");
        }
    }
}
