//! Names for indices, for errors, traces and pictures.

use std::borrow::Cow;

use phalanx_call::Value;

use crate::action::Contribution;

/// The names of a model's parameters and instances and of a rank's units, by index.
#[derive(Clone, PartialEq, Debug, Default)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Names {
    pub params: Vec<String>,
    pub instances: Vec<String>,
    pub units: Vec<String>,
}

impl Names {
    /// A contribution as text.
    pub fn describe(&self, contribution: &Contribution) -> String {
        let quoted = |names: &[String], index: usize| match names.get(index) {
            Some(name) => format!("`{name}`"),
            None => format!("number {index}"),
        };
        format!(
            "parameter {} of instance {}, micro-batch {}",
            quoted(&self.params, contribution.param),
            quoted(&self.instances, contribution.instance),
            contribution.microbatch
        )
    }

    /// A value as text, such as `blocks.3/h@mb0`.
    pub fn value(&self, value: &Value) -> String {
        let Value { instance, port, microbatch, again } = value;
        let again = if *again { " again" } else { "" };
        format!("{}/{port}@mb{microbatch}{again}", self.instance(*instance))
    }

    /// The name of an instance.
    pub(crate) fn instance(&self, number: usize) -> Cow<'_, str> {
        name(&self.instances, number, "instance")
    }

    /// The name of a unit.
    pub(crate) fn unit(&self, number: usize) -> Cow<'_, str> {
        name(&self.units, number, "unit")
    }
}

/// A name; or the index, in a script that was written by hand and has no names.
fn name<'a>(names: &'a [String], number: usize, what: &str) -> Cow<'a, str> {
    match names.get(number) {
        Some(name) => Cow::Borrowed(name),
        None => Cow::Owned(format!("{what} {number}")),
    }
}
