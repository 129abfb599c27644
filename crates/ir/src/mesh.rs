//! The device mesh: named axes, each a number of ranks.
//!
//! A mesh holds only *atoms*. Splitting `tp` in a mesh with `tp=4` replaces it by `tp.0=2 tp.1=2`;
//! the name `tp` then expands to both wherever it is read. No other code does sub-axis arithmetic.

use std::fmt;
use std::str::FromStr;

use crate::error::IrError;

/// The longest axis name that fits, in bytes.
const NAME: usize = 15;

/// The name of a mesh axis (`dp`, `tp`, `tp.0`…): a short string kept inline, so that layouts are
/// cheap to compare and copy and mean the same on every mesh that has an axis of that name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Axis {
    bytes: [u8; NAME],
    len: u8,
}

impl Axis {
    /// An axis of this name: letters, digits, `_` and `.`, starting with a letter.
    pub fn new(name: &str) -> Result<Self, IrError> {
        let legal = name.len() <= NAME
            && name.starts_with(|c: char| c.is_ascii_alphabetic())
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'.');
        // `P` introduces the partial-sum set in a layout's text and can't also name an axis.
        if !legal || name == "P" {
            return Err(IrError::AxisName { name: name.to_owned(), longest: NAME });
        }
        let mut bytes = [0; NAME];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        Ok(Self { bytes, len: name.len() as u8 })
    }

    /// The axis of pipeline parallelism, along which stages lie.
    pub const STAGES: Axis = Axis::known("pp");

    /// An axis with a name that is known to be legal at compile time.
    const fn known(name: &str) -> Self {
        let (from, mut bytes, mut i) = (name.as_bytes(), [0; NAME], 0);
        while i < from.len() {
            bytes[i] = from[i];
            i += 1;
        }
        Self { bytes, len: from.len() as u8 }
    }

    /// The name.
    pub fn name(&self) -> &str {
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).expect("axis names are ASCII")
    }

    fn is_part_of(&self, whole: &str) -> bool {
        self.name().strip_prefix(whole).is_some_and(|rest| rest.starts_with('.'))
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Named axes and their sizes, slowest-varying first. The ranks are all coordinate tuples.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Mesh {
    axes: Vec<(Axis, usize)>,
}

impl Mesh {
    /// The mesh of one rank, with no axis.
    pub const fn single() -> Self {
        Self { axes: Vec::new() }
    }

    /// A mesh with these axes, slowest-varying first.
    pub fn new<'a>(axes: impl IntoIterator<Item = (&'a str, usize)>) -> Result<Self, IrError> {
        let mut mesh = Self::default();
        for (name, size) in axes {
            let axis = Axis::new(name)?;
            if size == 0 {
                return Err(IrError::EmptyAxis { axis });
            }
            if mesh.size(axis).is_some() {
                return Err(IrError::DuplicateAxis { axis });
            }
            // The name of a whole axis means all its parts, so it cannot also be an axis itself.
            for &(other, _) in &mesh.axes {
                for (whole, part) in [(axis, other), (other, axis)] {
                    if part.is_part_of(whole.name()) {
                        return Err(IrError::AxisAndPart { whole, part });
                    }
                }
            }
            mesh.axes.push((axis, size));
        }
        Ok(mesh)
    }

    /// This mesh with `name` split into `name.0 × name.1 × …` of these sizes.
    pub fn split(&self, name: &str, sizes: &[usize]) -> Result<Self, IrError> {
        let axis = Axis::new(name)?;
        let size = self.size(axis).ok_or_else(|| self.unknown(name))?;
        if sizes.iter().product::<usize>() != size {
            return Err(IrError::Split { axis, size, parts: sizes.to_vec() });
        }
        let mut axes = Vec::new();
        for &(a, n) in &self.axes {
            if a != axis {
                axes.push((a, n));
                continue;
            }
            for (i, &part) in sizes.iter().enumerate() {
                axes.push((Axis::new(&format!("{name}.{i}"))?, part));
            }
        }
        Ok(Self { axes })
    }

    /// The atoms of a name: itself, or the parts it was split into, major to minor.
    pub fn expand(&self, name: &str) -> Result<Vec<Axis>, IrError> {
        let atoms = self.find(name);
        if atoms.is_empty() { Err(self.unknown(name)) } else { Ok(atoms) }
    }

    /// The same for a name that the mesh may not have: then the list is empty.
    pub fn find(&self, name: &str) -> Vec<Axis> {
        (self.axes.iter().map(|&(axis, _)| axis))
            .filter(|axis| axis.name() == name || axis.is_part_of(name))
            .collect()
    }

    /// The number of ranks along the atoms of a name; one if the mesh has no such axis.
    pub fn degree(&self, name: &str) -> usize {
        self.count(&self.find(name))
    }

    /// The atoms with their sizes, slowest-varying first.
    pub fn axes(&self) -> impl Iterator<Item = (Axis, usize)> + '_ {
        self.axes.iter().copied()
    }

    /// The number of ranks along an axis, if the mesh has it.
    pub fn size(&self, axis: Axis) -> Option<usize> {
        self.axes.iter().find(|(a, _)| *a == axis).map(|&(_, n)| n)
    }

    /// The number of blocks of a dim that is sharded by a list of axes.
    ///
    /// # Panics
    /// If the mesh does not have one of the axes. The verifier reports that before any such number
    /// is used. The same holds for every function here that takes axes.
    pub fn count(&self, axes: &[Axis]) -> usize {
        axes.iter().map(|&a| self.axes[self.place(a)].1).product()
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.axes.iter().map(|&(_, n)| n).product()
    }

    /// The coordinate of a rank along an axis.
    pub fn coordinate(&self, rank: usize, axis: Axis) -> usize {
        let at = self.place(axis);
        let faster: usize = self.axes[at + 1..].iter().map(|&(_, n)| n).product();
        rank / faster % self.axes[at].1
    }

    /// Which block a rank holds of a dim that is sharded by a list of axes.
    pub fn shard(&self, rank: usize, axes: &[Axis]) -> usize {
        axes.iter().fold(0, |shard, &axis| {
            shard * self.axes[self.place(axis)].1 + self.coordinate(rank, axis)
        })
    }

    /// The ranks that differ from a rank along these axes alone, itself included, in the order of
    /// the blocks they hold: the group of a collective over the axes.
    pub fn group(&self, rank: usize, axes: &[Axis]) -> Vec<usize> {
        let mut ranks: Vec<usize> = (0..self.ranks())
            .filter(|&other| {
                let same = |a: Axis| self.coordinate(other, a) == self.coordinate(rank, a);
                self.axes.iter().all(|&(a, _)| axes.contains(&a) || same(a))
            })
            .collect();
        ranks.sort_by_key(|&other| self.shard(other, axes));
        ranks
    }

    /// A set of axes as a number: bit i stands for the i-th axis.
    pub fn mask(&self, axes: &[Axis]) -> u32 {
        axes.iter().fold(0, |mask, &axis| mask | 1 << self.place(axis))
    }

    /// The axes of such a number, in the order of the mesh.
    pub fn axes_of(&self, mask: u32) -> Vec<Axis> {
        let numbered = self.axes.iter().enumerate();
        numbered.filter(|(i, _)| mask >> i & 1 == 1).map(|(_, (axis, _))| *axis).collect()
    }

    /// Which of the axes this is.
    fn place(&self, axis: Axis) -> usize {
        let found = self.axes.iter().position(|(a, _)| *a == axis);
        found.unwrap_or_else(|| panic!("no axis `{axis}` in the mesh ({self})"))
    }

    fn unknown(&self, name: &str) -> IrError {
        IrError::UnknownAxis { name: name.to_owned(), mesh: self.to_string() }
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (axis, size)) in self.axes.iter().enumerate() {
            write!(f, "{}{axis}={size}", if i > 0 { " " } else { "" })?;
        }
        Ok(())
    }
}

impl FromStr for Mesh {
    type Err = IrError;

    /// Reads `dp=2 tp=4`.
    fn from_str(text: &str) -> Result<Self, IrError> {
        let axes = text.split_whitespace().map(|part| {
            let bad = || IrError::MeshText { part: part.to_owned() };
            let (name, size) = part.split_once('=').ok_or_else(bad)?;
            Ok((name, size.parse().map_err(|_| bad())?))
        });
        Mesh::new(axes.collect::<Result<Vec<_>, IrError>>()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_axis_is_a_name_for_its_atoms() {
        let mesh: Mesh = "dp=2 tp=4".parse().unwrap();
        let split = mesh.split("tp", &[2, 2]).unwrap();
        assert_eq!(split.to_string(), "dp=2 tp.0=2 tp.1=2");
        assert_eq!(split.ranks(), 8);
        let names: Vec<String> = split.expand("tp").unwrap().iter().map(Axis::to_string).collect();
        assert_eq!(names, ["tp.0", "tp.1"]);
        assert_eq!(split.count(&split.expand("tp").unwrap()), 4);
    }

    #[test]
    fn ranks_have_coordinates_and_groups() {
        let mesh: Mesh = "dp=2 cp=3 tp=2".parse().unwrap();
        let [dp, cp, tp] = ["dp", "cp", "tp"].map(|name| Axis::new(name).unwrap());
        // Rank 9 is dp 1, cp 1, tp 1; the last axis varies fastest.
        assert_eq!([dp, cp, tp].map(|a| mesh.coordinate(9, a)), [1, 1, 1]);
        assert_eq!(mesh.shard(9, &[tp, cp]), 4);
        assert_eq!(mesh.group(9, &[tp]), [8, 9]);
        assert_eq!(mesh.group(9, &[dp]), [3, 9]);
        assert_eq!(mesh.group(9, &[cp, tp]), [6, 7, 8, 9, 10, 11]);
        // The order of the axes is the order of the group.
        assert_eq!(mesh.group(9, &[tp, cp]), [6, 8, 10, 7, 9, 11]);
        assert_eq!(mesh.group(9, &[]), [9]);
    }

    #[test]
    fn impossible_meshes_are_refused() {
        assert!("dp=2 dp=2".parse::<Mesh>().is_err());
        for both in ["tp=2 tp.0=2", "tp.0=2 tp=2"] {
            let error = both.parse::<Mesh>().unwrap_err().to_string();
            assert!(error.contains("`tp` and its part `tp.0`"), "{error}");
        }
        assert!("dp=0".parse::<Mesh>().is_err());
        assert!("dp".parse::<Mesh>().is_err());
        assert!("P=2".parse::<Mesh>().is_err());
        let mesh: Mesh = "tp=4".parse().unwrap();
        assert_eq!(
            mesh.split("tp", &[3, 2]).unwrap_err().to_string(),
            "axis `tp` has 4 ranks and cannot be split into 3 × 2 = 6"
        );
        assert!(mesh.expand("cp").unwrap_err().to_string().contains("tp=4"));
    }
}
