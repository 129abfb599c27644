//! The type of a value: element type, global shape, layout.

use std::fmt;

use crate::dtype::DType;
use crate::error::IrError;
use crate::layout::{Layout, LocalPart, Order};
use crate::mesh::{Axis, Mesh};

/// The kind of value that a type describes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Form {
    /// An ordinary tensor.
    #[default]
    Tensor,
    /// Local blocks of several parameters packed into one flat padded buffer, of which each rank
    /// of the sharding axes holds a contiguous part. Only elementwise ops, optimizer updates and
    /// collectives accept it.
    Unit,
}

/// Element type, **global** shape and layout of a value. Local shapes follow from the layout.
///
/// A dim whose size its shards would not divide is padded: `f32[10~12]{0:a,b}` has 10 elements,
/// laid out as 12. The padded extent is the same in every layout of the value (and of all values
/// whose dims are joined through factors), so collectives move whole blocks. Padding may hold
/// anything; kernels that combine elements use only the valid ones.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TensorType {
    /// The element type.
    pub dtype: DType,
    /// The global shape.
    pub shape: Vec<usize>,
    /// The extent of each dim with its padding; what shards divide.
    padded: Vec<usize>,
    /// How it is distributed over the mesh.
    pub layout: Layout,
    /// Tensor or unit.
    pub form: Form,
    /// Whether this is the handle of a collective that was started and not yet waited for; it is
    /// used exactly once, and waiting gives the value that the rest of the type describes.
    pub pending: bool,
}

impl TensorType {
    /// A tensor replicated over every axis.
    pub fn new(dtype: DType, shape: impl Into<Vec<usize>>) -> Self {
        let shape = shape.into();
        let layout = Layout::replicated(shape.len());
        Self { dtype, padded: shape.clone(), shape, layout, form: Form::Tensor, pending: false }
    }

    /// A packed unit of this many elements, replicated.
    pub fn unit(dtype: DType, elements: usize) -> Self {
        Self { form: Form::Unit, ..Self::new(dtype, [elements]) }
    }

    /// The same value in another layout.
    pub fn with_layout(&self, layout: Layout) -> Self {
        Self { layout, ..self.clone() }
    }

    /// The same value in another element type.
    pub fn with_dtype(&self, dtype: DType) -> Self {
        Self { dtype, ..self.clone() }
    }

    /// The same value with its dims padded to these extents, none smaller than its size.
    pub fn with_padded(&self, padded: Vec<usize>) -> Result<Self, IrError> {
        let fits = padded.len() == self.shape.len()
            && padded.iter().zip(&self.shape).all(|(padded, size)| padded >= size);
        if !fits {
            let what = format!("cannot be padded to {padded:?}");
            return Err(IrError::operands("type", format!("{self} {what}")));
        }
        Ok(Self { padded, ..self.clone() })
    }

    /// The extent of each dim with its padding.
    pub fn padded(&self) -> &[usize] {
        &self.padded
    }

    /// Elements of the whole value.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of the whole value.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// The shape that one rank holds: each padded dim divided by its shard count.
    pub fn local_shape(&self, mesh: &Mesh) -> Vec<usize> {
        (self.padded.iter().zip(self.layout.dims()))
            .map(|(&padded, sharding)| padded / mesh.count(&sharding.axes))
            .collect()
    }

    /// The part of a dim that a rank holds.
    pub fn part(&self, dim: usize, mesh: &Mesh, rank: usize) -> LocalPart {
        let sharding = &self.layout.dims()[dim];
        LocalPart {
            order: sharding.order,
            shard: (mesh.shard(rank, &sharding.axes) + sharding.turn) % mesh.count(&sharding.axes),
            shards: mesh.count(&sharding.axes),
            extent: self.padded[dim],
        }
    }

    /// How many elements of each dim are valid on a rank: the rest of its local shape is padding.
    /// They are the first ones in every order, and there may be none.
    pub fn local_valid(&self, mesh: &Mesh, rank: usize) -> Vec<usize> {
        let dims = self.shape.iter().enumerate();
        dims.map(|(dim, &size)| self.part(dim, mesh, rank).valid(size)).collect()
    }

    /// Bytes that one rank holds.
    pub fn local_bytes(&self, mesh: &Mesh) -> usize {
        self.local_shape(mesh).iter().product::<usize>() * self.dtype.size()
    }

    /// Fails if the layout is not possible for a value of this shape: an unknown axis, or a padded
    /// extent that its shards (in zigzag order twice as many blocks) do not divide.
    pub fn check(&self, mesh: &Mesh) -> Result<(), IrError> {
        let bad = |axis: Axis, what: String| {
            Err(IrError::TypeLayout { ty: self.to_string(), axis, what })
        };
        if let Some(axis) = self.layout.all_axes().find(|&a| mesh.size(a).is_none()) {
            return bad(axis, format!("there is no axis `{axis}` in the mesh ({mesh})"));
        }
        for (dim, (&padded, sharding)) in self.padded.iter().zip(self.layout.dims()).enumerate() {
            let axes = &sharding.axes;
            let (Some(&axis), shards) = (axes.first(), mesh.count(axes)) else { continue };
            let (blocks, what) = match sharding.order {
                Order::Zigzag => (2 * shards, "blocks of a zigzag over"),
                _ => (shards, "shards of"),
            };
            if !padded.is_multiple_of(blocks) {
                let (size, enough) = (self.shape[dim], padded.next_multiple_of(blocks));
                return bad(
                    axis,
                    format!(
                        "dim {dim} has {padded} elements, which the {blocks} {what} {axes:?} do \
                         not divide; pad it (`{size}~{enough}`)"
                    ),
                );
            }
        }
        Ok(())
    }

    /// Reads `bf16[8,4096]{0:dp P:tp}`, `f32[10~12]`, `f32[*1024]{*:dp}` or `pending f32[8]`.
    pub fn parse(text: &str, mesh: &Mesh) -> Result<Self, IrError> {
        let bad = || IrError::operands("type", format!("`{text}` is not `dtype[dims]{{layout}}`"));
        let trimmed = text.trim();
        let (pending, rest) = match trimmed.strip_prefix("pending ") {
            Some(rest) => (true, rest),
            None => (false, trimmed),
        };
        let (dtype, rest) = rest.split_once('[').ok_or_else(bad)?;
        let (dims, rest) = rest.split_once(']').ok_or_else(bad)?;
        let (unit, dims) = match dims.strip_prefix('*') {
            Some(dims) => (true, dims),
            None => (false, dims),
        };
        let number = |text: &str| text.trim().parse::<usize>().map_err(|_| bad());
        let extents = (dims.split(',').filter(|d| !d.is_empty()))
            .map(|d| match d.split_once('~') {
                Some((size, padded)) => Ok((number(size)?, number(padded)?)),
                None => number(d).map(|size| (size, size)),
            })
            .collect::<Result<Vec<(usize, usize)>, IrError>>()?;
        let (shape, padded): (Vec<usize>, Vec<usize>) = extents.into_iter().unzip();
        // A unit is one flat dim, and its size in bytes must not overflow for any element type.
        let widest = crate::ops::product(&padded).and_then(|n| n.checked_mul(8));
        let smaller = padded.iter().zip(&shape).any(|(padded, size)| padded < size);
        if (unit && shape.len() != 1) || smaller || widest.is_none() {
            return Err(bad());
        }
        let rest = rest.trim();
        let inner = match rest.strip_prefix('{').and_then(|r| r.strip_suffix('}')) {
            Some(inner) => inner,
            None if rest.is_empty() => "",
            None => return Err(bad()),
        };
        let dtype = dtype.trim().parse().map_err(|what: String| IrError::operands("type", what))?;
        let layout = Layout::parse(inner, shape.len(), mesh)?;
        let form = if unit { Form::Unit } else { Form::Tensor };
        Ok(Self { dtype, shape, padded, layout, form, pending })
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> = (self.shape.iter().zip(&self.padded))
            .map(
                |(size, padded)| {
                    if size == padded { size.to_string() } else { format!("{size}~{padded}") }
                },
            )
            .collect();
        let prefix = if self.pending { "pending " } else { "" };
        let star = if self.form == Form::Unit { "*" } else { "" };
        write!(f, "{prefix}{}[{star}{}]", self.dtype, dims.join(","))?;
        if self.layout.is_replicated() {
            return Ok(());
        }
        let layout = self.layout.to_string();
        match self.form {
            Form::Unit => write!(f, "{}", layout.replacen("0:", "*:", 1)),
            _ => write!(f, "{layout}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_print_and_parse_back() {
        let mesh: Mesh = "dp=2 tp=4".parse().unwrap();
        for text in [
            "f32[]",
            "bf16[8,4096,2048]{0:dp 1:tp}",
            "f32[*1024]{*:dp P:tp}",
            "pending f32[8,16]{0:dp}",
            "pending f32[*8]",
            "pending f32[*8]{*:dp}",
            "i32[4]",
            "f32[10~16,7]{0:dp,tp}",
        ] {
            assert_eq!(TensorType::parse(text, &mesh).unwrap().to_string(), text);
        }
        assert!(TensorType::parse("f31[8]", &mesh).is_err());
        assert!(TensorType::parse("f32[*8,4]", &mesh).is_err());
        assert!(TensorType::parse("f32[4294967296,4294967296]", &mesh).is_err());
        assert!(TensorType::parse("f32 8", &mesh).is_err());
    }

    #[test]
    fn shards_divide_the_padded_extent() {
        let mesh: Mesh = "a=2 b=2 one=1".parse().unwrap();
        let check = |text: &str| TensorType::parse(text, &mesh).unwrap().check(&mesh);
        for legal in ["f32[50257~50258]{0:a}", "f32[8]{0:a,b}", "f32[5~8]{0:a@zigzag}", "f32[5~8]"]
        {
            check(legal).unwrap();
        }
        let error = check("f32[3,10]{1:a,b}").unwrap_err().to_string();
        for part in ["dim 1 has 10", "4 shards of [a, b]", "pad it (`10~12`)"] {
            assert!(error.contains(part), "{error}");
        }
        assert!(check("f32[10]{0:a@zigzag}").unwrap_err().to_string().contains("4 blocks"));
        let ty = TensorType::parse("f32[50257~50260,768]{0:a,b}", &mesh).unwrap();
        assert_eq!(ty.local_shape(&mesh), [12565, 768]);
        assert_eq!(ty.local_bytes(&mesh), 12565 * 768 * 4);
        assert_eq!(ty.bytes(), 50257 * 768 * 4);
        assert!(TensorType::parse("f32[10~8]", &mesh).is_err());
        assert!(ty.with_padded(vec![50260, 700]).is_err());
    }

    #[test]
    fn valid_elements_come_first_on_every_rank_and_add_up() {
        let mesh: Mesh = "a=2 b=2".parse().unwrap();
        for (text, expected) in [
            ("f32[5~8]{0:a,b}", [2, 2, 1, 0]),
            ("f32[5~8]{0:a,b@striped}", [2, 1, 1, 1]),
            ("f32[5~8]{0:a,b@zigzag}", [1, 1, 1, 2]),
            ("f32[2~8]{0:a,b}", [2, 0, 0, 0]),
            ("f32[5~8]{0:b}", [4, 1, 4, 1]),
        ] {
            let ty = TensorType::parse(text, &mesh).unwrap();
            let valid: Vec<usize> = (0..4).map(|rank| ty.local_valid(&mesh, rank)[0]).collect();
            assert_eq!(valid, expected, "{text}");
        }
    }
}
