//! Padded extents: which factor the padding of a dim belongs to, and which kernels must not read
//! it.
//!
//! The padding of a dim lies after its last element, so in a dim of several factors only the major
//! one can be padded: the padding of a minor factor would lie between the elements of the others.

use super::{FactorKind, Place, Rule, RuleError};
use crate::types::TensorType;

impl Rule {
    /// The padded extent of each factor, the same in every operand and result that has it.
    pub fn extents(
        &self,
        inputs: &[&TensorType],
        outputs: &[&TensorType],
    ) -> Result<Vec<usize>, RuleError> {
        let mut found: Vec<Option<(Place, usize)>> = vec![None; self.factors.len()];
        let operands = (self.inputs.iter().zip(inputs).enumerate())
            .map(|(i, (dims, ty))| (Place::Operand(i), dims, ty));
        let results = (self.outputs.iter().zip(outputs).enumerate())
            .map(|(i, (dims, ty))| (Place::Result(i), dims, ty));
        for (place, dims, ty) in operands.chain(results) {
            for (dim, factors) in dims.iter().enumerate() {
                for (factor, extent) in self.dim_extents(place, factors, ty, dim)? {
                    let (first, other) = *found[factor].get_or_insert((place, extent));
                    if other != extent {
                        let factor = self.factors[factor].name.clone();
                        let places = [(first, other), (place, extent)];
                        return Err(RuleError::Padding { factor, places });
                    }
                }
            }
        }
        let known = found.into_iter().zip(&self.factors);
        Ok(known.map(|(extent, factor)| extent.map_or(factor.size, |(_, e)| e)).collect())
    }

    /// The padded extent of each dim of a result.
    pub(super) fn padded(&self, index: usize, extents: &[usize]) -> Result<Vec<usize>, RuleError> {
        let dims = self.outputs[index].iter();
        dims.map(|factors| {
            let carrier = carrier(self, factors);
            for (at, &factor) in factors.iter().enumerate() {
                let size = self.factors[factor].size;
                if extents[factor] != size && Some(at) != carrier {
                    return Err(RuleError::MinorPadding {
                        place: Place::Result(index),
                        factor: self.factors[factor].name.clone(),
                        size,
                        padded: extents[factor],
                    });
                }
            }
            Ok(factors.iter().map(|&f| extents[f]).product())
        })
        .collect()
    }

    /// Whether a kernel must use only the valid elements of a factor, because it combines them: it
    /// sums over the factor, reduces it inside, or needs all of it. Padding may hold anything, not
    /// only zeros, and a rank may hold only padding. Along other factors elements are independent,
    /// and a result computed from padding is padding.
    pub fn bounds(&self, factor: usize) -> bool {
        let has = |dims: &Vec<Vec<usize>>| dims.iter().any(|d| d.contains(&factor));
        let read = self.inputs.iter().any(has);
        read && (self.factors[factor].kind != FactorKind::Free || !self.outputs.iter().all(has))
    }

    fn dim_extents(
        &self,
        place: Place,
        factors: &[usize],
        ty: &TensorType,
        dim: usize,
    ) -> Result<Vec<(usize, usize)>, RuleError> {
        let mut extents: Vec<(usize, usize)> =
            factors.iter().map(|&f| (f, self.factors[f].size)).collect();
        let padded = ty.padded()[dim];
        if padded == ty.shape[dim] {
            return Ok(extents);
        }
        let Some(at) = carrier(self, factors) else { return Ok(extents) };
        let minor: usize = extents[at + 1..].iter().map(|&(_, size)| size).product();
        if minor == 0 || !padded.is_multiple_of(minor) {
            let factor = self.factors[factors[at]].name.clone();
            return Err(RuleError::SplitPadding { place, factor, padded, minor });
        }
        extents[at].1 = padded / minor;
        Ok(extents)
    }
}

/// Which of a dim's factors its padding belongs to: the first that is not a single element.
pub(super) fn carrier(rule: &Rule, factors: &[usize]) -> Option<usize> {
    let first = factors.iter().position(|&f| rule.factors[f].size != 1);
    first.or(if factors.is_empty() { None } else { Some(0) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Mesh;

    fn types(mesh: &Mesh, texts: &[&str]) -> Vec<TensorType> {
        texts.iter().map(|t| TensorType::parse(t, mesh).unwrap()).collect()
    }

    fn infer(rule: &Rule, mesh: &Mesh, texts: &[&str]) -> Result<Vec<Vec<usize>>, RuleError> {
        let types = types(mesh, texts);
        let refs: Vec<&TensorType> = types.iter().collect();
        Ok(rule.infer(mesh, &refs)?.into_iter().map(|(_, padded)| padded).collect())
    }

    #[test]
    fn padding_follows_the_factor_and_must_agree() {
        let mesh: Mesh = "a=2 b=2".parse().unwrap();
        let rule = Rule::declare("s d, d e -> s e", &[&[5, 6], &[6, 7]], &[&[5, 7]]);
        let padded = infer(&rule, &mesh, &["f32[5~8,6]{0:a,b}", "f32[6,7~8]"]).unwrap();
        assert_eq!(padded, [[8, 8]]);
        let error = infer(&rule, &mesh, &["f32[5,6~8]{1:a}", "f32[6,7]{0:a}"]).unwrap_err();
        let places = [(Place::Operand(0), 8), (Place::Operand(1), 6)];
        assert_eq!(error, RuleError::Padding { factor: "d".to_owned(), places });
        // Gathered over b or not, the size is that of the factor.
        let padded = infer(&rule, &mesh, &["f32[5~8,6]{0:a}", "f32[6,7]"]).unwrap();
        assert_eq!(padded, [[8, 7]]);
    }

    #[test]
    fn only_the_major_factor_of_a_compound_is_padded() {
        let mesh: Mesh = "a=2 b=2".parse().unwrap();
        let split = Rule::declare("(h d) -> h d", &[&[12]], &[&[3, 4]]);
        assert_eq!(infer(&split, &mesh, &["f32[12~16]{0:a,b}"]).unwrap(), [[4, 4]]);
        let error = infer(&split, &mesh, &["f32[12~14]{0:a}"]).unwrap_err();
        assert!(matches!(error, RuleError::SplitPadding { padded: 14, minor: 4, .. }));
        let merge = Rule::declare("h d -> (h d)", &[&[3, 4]], &[&[12]]);
        assert_eq!(infer(&merge, &mesh, &["f32[3~4,4]{0:a}"]).unwrap(), [[16]]);
        let error = infer(&merge, &mesh, &["f32[3,4~6]"]).unwrap_err();
        assert!(matches!(error, RuleError::MinorPadding { padded: 6, .. }), "{error:?}");
        // A factor of one element does not matter.
        let merge = Rule::declare("h d -> (h d)", &[&[1, 5]], &[&[5]]);
        assert_eq!(infer(&merge, &mesh, &["f32[1,5~6]{1:a}"]).unwrap(), [[6]]);
    }

    #[test]
    fn kernels_keep_to_what_is_valid_where_they_take_elements_together() {
        let bounded = |rule: &Rule| -> Vec<String> {
            let all = (0..rule.factors.len()).filter(|&f| rule.bounds(f));
            all.map(|f| rule.factors[f].name.clone()).collect()
        };
        let matmul = Rule::declare("s d, d e -> s e", &[&[5, 6], &[6, 7]], &[&[5, 7]]);
        assert_eq!(bounded(&matmul), ["d"]);
        let norm = Rule::declare("s d, d -> s d, s", &[&[5, 6], &[6]], &[&[5, 6], &[5]]);
        assert_eq!(bounded(&norm.lowered("d")), ["d"]);
        // The gradient of a norm's weight sums over the rows.
        let grad = Rule::declare("s d, s d -> s d, d", &[&[5, 6], &[5, 6]], &[&[5, 6], &[6]]);
        assert_eq!(bounded(&grad), ["s"]);
        let rotary = Rule::declare("s d -> s d", &[&[5, 6]], &[&[5, 6]]).whole("d");
        assert_eq!(bounded(&rotary), ["d"]);
        // The rows of an embedding's table gradient are made, not read.
        let table = Rule::declare("s, s w -> v w", &[&[5], &[5, 6]], &[&[9, 6]]);
        assert_eq!(bounded(&table), ["s"]);
    }
}
