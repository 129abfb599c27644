//! Reading declarations such as `b s (g r) d, b t g d -> b s (g r) d`.

use super::{Dim, Factor};

/// Reads declarations, giving each factor a number and a size.
#[derive(Default)]
pub(super) struct Reader {
    names: Vec<String>,
    sizes: Vec<Option<usize>>,
    /// The size of the compound dim each factor was last seen in, to solve for one unknown.
    compounds: Vec<(Vec<usize>, usize)>,
}

impl Reader {
    pub(super) fn operand(&mut self, text: &str, shape: &[usize]) -> Vec<Dim> {
        let tokens = tokens(text);
        let named = tokens.iter().filter(|t| t.as_slice() != ["..."]).count();
        let mut dims = Vec::new();
        for token in tokens {
            if token == ["..."] {
                // Leading dims align at the left: they are the same dims in every operand.
                for i in 0..shape.len() - named {
                    let factor = self.factor(&position(i));
                    self.sizes[factor] = Some(shape[dims.len()]);
                    dims.push(vec![factor]);
                }
                continue;
            }
            let factors: Dim = token.iter().map(|name| self.factor(name)).collect();
            let size = shape[dims.len()];
            match factors.as_slice() {
                [one] => self.sizes[*one] = Some(size),
                _ => self.compounds.push((factors.clone(), size)),
            }
            dims.push(factors);
        }
        dims
    }

    fn factor(&mut self, name: &str) -> usize {
        if let Some(found) = self.names.iter().position(|n| n == name) {
            return found;
        }
        self.names.push(name.to_owned());
        self.sizes.push(None);
        self.names.len() - 1
    }

    pub(super) fn factors(mut self) -> Vec<Factor> {
        for (factors, size) in self.compounds.clone() {
            let known: usize = factors.iter().filter_map(|&f| self.sizes[f]).product();
            let unknown = factors.iter().filter(|&&f| self.sizes[f].is_none()).count();
            assert!(unknown < 2, "{:?}: sizes of two factors of a dim are unknown", self.names);
            for f in factors {
                self.sizes[f].get_or_insert(size / known.max(1));
            }
        }
        (self.names.into_iter().zip(self.sizes))
            .map(|(name, size)| {
                let size = size.expect("every factor is in a dim, whose size is known");
                Factor::free(name, size)
            })
            .collect()
    }
}

/// Splits `b s (g r) ...` into dims, each a list of names.
fn tokens(text: &str) -> Vec<Vec<&str>> {
    let mut out = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        if let Some(inner) = rest.strip_prefix('(') {
            let (compound, tail) = inner.split_once(')').expect("parentheses close");
            out.push(compound.split_whitespace().collect());
            rest = tail.trim_start();
        } else {
            let (name, tail) = rest.split_once(' ').unwrap_or((rest, ""));
            out.push(vec![name]);
            rest = tail.trim_start();
        }
    }
    out
}

/// The name of a factor that is identified by its position alone, the same in every op: so a
/// gradient has the same factors as its op.
pub(super) fn position(index: usize) -> String {
    format!("x{index}")
}
