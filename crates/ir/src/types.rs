//! The type of a value: element type, global shape, layout.

use std::fmt;

use crate::dtype::DType;
use crate::error::IrError;
use crate::layout::{Layout, Order};
use crate::mesh::{Axis, Mesh};

/// What sort of value a type describes.
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
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TensorType {
    /// The element type.
    pub dtype: DType,
    /// The global shape.
    pub shape: Vec<usize>,
    /// How it lies on the mesh.
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
        Self { dtype, shape, layout, form: Form::Tensor, pending: false }
    }

    /// A packed unit of this many elements, replicated.
    pub fn unit(dtype: DType, elements: usize) -> Self {
        Self { form: Form::Unit, ..Self::new(dtype, [elements]) }
    }

    /// The same value in another layout.
    pub fn with_layout(&self, layout: Layout) -> Self {
        Self { layout, ..self.clone() }
    }

    /// Elements of the whole value.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of the whole value.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// The shape that one rank holds: each dim divided by its shard count, rounded up where the
    /// global size does not divide (the last shard is then padded).
    pub fn local_shape(&self, mesh: &Mesh) -> Vec<usize> {
        (self.shape.iter().zip(self.layout.dims()))
            .map(|(&size, sharding)| size.div_ceil(mesh.count(&sharding.axes)))
            .collect()
    }

    /// Bytes that one rank holds.
    pub fn local_bytes(&self, mesh: &Mesh) -> usize {
        self.local_shape(mesh).iter().product::<usize>() * self.dtype.size()
    }

    /// Fails if the layout can't hold a value of this shape: an unknown axis, a zigzag dim that
    /// does not cut into its blocks, or padding over several axes. A dim that does not divide is
    /// padded to a multiple of its shards; over one axis that is the same number in every layout
    /// the value can have, over several it would depend on which of them shard the dim.
    pub fn check(&self, mesh: &Mesh) -> Result<(), IrError> {
        let bad = |axis: Axis, what: String| {
            Err(IrError::TypeLayout { ty: self.to_string(), axis, what })
        };
        if let Some(axis) = self.layout.all_axes().find(|&a| mesh.size(a).is_none()) {
            return bad(axis, format!("no axis `{axis}` in the mesh ({mesh})"));
        }
        for (dim, (&size, sharding)) in self.shape.iter().zip(self.layout.dims()).enumerate() {
            let axes = &sharding.axes;
            let (Some(&axis), shards) = (axes.first(), mesh.count(axes)) else { continue };
            if sharding.order == Order::Zigzag && !size.is_multiple_of(2 * shards) {
                let blocks = 2 * shards;
                return bad(
                    axis,
                    format!(
                        "dim {dim} has {size} elements, which do not cut into the {blocks} blocks of \
                     a zigzag over {axes:?}"
                    ),
                );
            }
            let several = axes.iter().filter(|&&a| mesh.size(a) != Some(1)).count() > 1;
            if several && !size.is_multiple_of(shards) {
                return bad(
                    axis,
                    format!(
                        "dim {dim} has {size} elements, which the {shards} shards of {axes:?} do not \
                     divide; the padded size must be the same in every layout, so only a single \
                     axis may shard it"
                    ),
                );
            }
        }
        Ok(())
    }

    /// Reads `bf16[8,4096]{0:dp P:tp}`, `f32[*1024]{*:dp}` or `pending f32[8]`.
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
        let shape = (dims.split(',').filter(|d| !d.is_empty()))
            .map(|d| d.trim().parse().map_err(|_| bad()))
            .collect::<Result<Vec<usize>, _>>()?;
        // A unit is one flat dim, and a size in bytes must be countable whatever the element type.
        let widest = crate::ops::product(&shape).and_then(|n| n.checked_mul(8));
        if (unit && shape.len() != 1) || widest.is_none() {
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
        Ok(Self { dtype, shape, layout, form, pending })
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> = self.shape.iter().map(usize::to_string).collect();
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
        ] {
            assert_eq!(TensorType::parse(text, &mesh).unwrap().to_string(), text);
        }
        assert!(TensorType::parse("f31[8]", &mesh).is_err());
        assert!(TensorType::parse("f32[*8,4]", &mesh).is_err());
        assert!(TensorType::parse("f32[4294967296,4294967296]", &mesh).is_err());
        assert!(TensorType::parse("f32 8", &mesh).is_err());
    }

    #[test]
    fn uneven_dims_round_up() {
        let mesh: Mesh = "tp=2".parse().unwrap();
        let ty = TensorType::parse("f32[50257,768]{0:tp}", &mesh).unwrap();
        assert_eq!(ty.local_shape(&mesh), [25129, 768]);
        assert_eq!(ty.local_bytes(&mesh), 25129 * 768 * 4);
    }

    #[test]
    fn padding_over_several_axes_is_refused() {
        let mesh: Mesh = "a=2 b=2 one=1".parse().unwrap();
        let check = |text: &str| TensorType::parse(text, &mesh).unwrap().check(&mesh);
        for legal in
            ["f32[50257]{0:a}", "f32[50257]{0:a,one}", "f32[8]{0:a,b}", "f32[8]{0:a@zigzag}"]
        {
            check(legal).unwrap();
        }
        let error = check("f32[3,10]{1:a,b}").unwrap_err().to_string();
        for part in ["dim 1 has 10", "4 shards of [a, b]", "same in every layout"] {
            assert!(error.contains(part), "{error}");
        }
        assert!(check("f32[10]{0:a@zigzag}").unwrap_err().to_string().contains("4 blocks"));
    }
}
