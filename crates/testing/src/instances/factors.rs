//! Rows and columns of matrices in a unit.

use phalanx_ir::ops::{FactorDirection, FactorMeans, Factors, MatrixPlace};
use phalanx_reference::RefTensor;

use super::{Cases, normal, positive};

impl Cases {
    /// Means and directions, with and without the scalars that say whether anything changes.
    pub(super) fn factors(&mut self, clip: &RefTensor, go: [&RefTensor; 2]) {
        let matrices = normal("matrices", &[44]);
        let (rows, columns) = (positive("rows", &[8]), positive("columns", &[8]));
        self.add(FactorMeans { factors: factors() }, &[&matrices]);
        let direction = FactorDirection { factors: factors() };
        self.add(direction.clone(), &[&matrices, &rows, &columns, clip]);
        for go in go {
            self.add(direction.clone(), &[&matrices, &rows, &columns, clip, go]);
        }
    }
}

/// Two blocks of 22 elements with gaps: a matrix of 3 × 5 whose columns are cut, a vector of 3 whose rows are,
/// and two matrices of 1 × 1, one in each block. Tiles have padding.
fn factors() -> Factors {
    let matrix = MatrixPlace {
        begin: 1,
        tile: vec![3, 3],
        sizes: vec![3, 5],
        moves: vec![vec![0], vec![3]],
    };
    let vector = MatrixPlace {
        begin: 12,
        tile: vec![2, 1],
        sizes: vec![3, 1],
        moves: vec![vec![2], vec![0]],
    };
    let stack = MatrixPlace {
        begin: 16,
        tile: vec![1, 1, 2],
        sizes: vec![2, 1, 1],
        moves: vec![vec![1], vec![0], vec![0]],
    };
    Factors { members: vec![matrix, vector, stack], block: 22, grid: vec![2] }
}
