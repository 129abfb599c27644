//! Parameters as matrices, for updates that keep a number for each row and column (Adafactor).
//!
//! The last two dims of a parameter are rows and columns; a vector is a matrix of one column. What is kept
//! of a unit is two short vectors, the same on every rank, whatever part of the unit the rank holds.

use phalanx_ir::layout::Order;
use phalanx_ir::ops::MatrixPlace;
use phalanx_ir::{Axis, DType, Mesh, TensorType};

use crate::error::ScriptError;
use crate::unit::Unit;

/// What the elements of a state belong to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum StateOf {
    /// Elements of the parameters: a state has the shape of its parameter.
    #[default]
    Elements,
    /// Rows of the parameters.
    Rows,
    /// Columns of the parameters.
    Columns,
}

impl StateOf {
    /// The shape of such a state of a parameter of this shape.
    pub fn shape(self, param: &[usize]) -> Vec<usize> {
        let matrix = as_matrix(param);
        let (rows, last) = matrix.split_at(matrix.len() - 1);
        match self {
            StateOf::Elements => param.to_vec(),
            StateOf::Rows => rows.to_vec(),
            StateOf::Columns => [&rows[..rows.len() - 1], last].concat(),
        }
    }
}

impl Unit {
    /// The type of a state that an update keeps of it, where a rank updates.
    pub(crate) fn state(&self, of: StateOf, dtype: DType, mesh: &Mesh) -> TensorType {
        let [rows, columns] = self.factors.totals();
        match of {
            StateOf::Elements => self.updated(dtype, mesh),
            StateOf::Rows => TensorType::new(dtype, [rows]),
            StateOf::Columns => TensorType::new(dtype, [columns]),
        }
    }
}

/// A shape with rows and columns.
fn as_matrix(shape: &[usize]) -> Vec<usize> {
    let missing = 2_usize.saturating_sub(shape.len());
    shape.iter().copied().chain(std::iter::repeat_n(1, missing)).collect()
}

/// How a parameter's tile lies in a block of a unit that these axes cut.
pub(crate) fn matrix(
    (name, shape): (&str, &[usize]),
    ty: Option<&TensorType>,
    blocks: &[Axis],
    mesh: &Mesh,
) -> Result<MatrixPlace, ScriptError> {
    let tile = ty.map_or(shape.to_vec(), |ty| ty.local_shape(mesh));
    let (tile, sizes) = (as_matrix(&tile), as_matrix(shape));
    let mut moves = vec![vec![0; blocks.len()]; sizes.len()];
    for (dim, sharding) in ty.iter().flat_map(|ty| ty.layout.dims().iter().enumerate()) {
        if sharding.order != Order::Block && !sharding.axes.is_empty() {
            return Err(ScriptError::Schedule(format!(
                "`{name}` is sharded in the order {:?}, and parameters are in blocks",
                sharding.order
            )));
        }
        // A step along an axis passes over the tiles of the more minor ones.
        let mut by = tile[dim];
        for axis in sharding.axes.iter().rev() {
            let at = blocks.iter().position(|own| own == axis);
            moves[dim][at.expect("the axes of a parameter are those of its unit")] = by;
            by *= mesh.count(&[*axis]);
        }
    }
    Ok(MatrixPlace { begin: 0, tile, sizes, moves })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_of_rows_and_columns_have_shapes_of_their_own() {
        for (shape, rows, columns) in [
            (vec![], vec![1], vec![1]),
            (vec![5], vec![5], vec![1]),
            (vec![3, 5], vec![3], vec![5]),
            (vec![2, 4, 3, 5], vec![2, 4, 3], vec![2, 4, 5]),
        ] {
            assert_eq!(StateOf::Elements.shape(&shape), shape);
            assert_eq!(StateOf::Rows.shape(&shape), rows);
            assert_eq!(StateOf::Columns.shape(&shape), columns);
        }
    }

    /// Rows on b, columns on c then a: a is the more minor one.
    #[test]
    fn a_tile_moves_with_the_axes_that_cut_its_dims() {
        let mesh = Mesh::new([("a", 2), ("b", 3), ("c", 2)]).unwrap();
        let blocks = ["a", "b", "c"].map(|axis| Axis::new(axis).unwrap());
        let ty = TensorType::parse("f32[6,8]{0:b 1:c,a}", &mesh).unwrap();
        let place = matrix(("w", &[6, 7]), Some(&ty), &blocks, &mesh).unwrap();
        assert_eq!((place.tile, place.sizes), (vec![2, 2], vec![6, 7]));
        assert_eq!(place.moves, [[0, 2, 0], [2, 0, 4]]);
    }
}
