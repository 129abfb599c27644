//! Putting segments together into a model.
//!
//! A segment declares its parameters where it uses them, so a model needs no second list of them:
//! the chain reads names and shapes from the program and asks only for the initial values.

use std::collections::BTreeMap;

use phalanx_ir::{Builder, Init, IrError, Model, Param, Program, Role};

/// A model being put together, segment after segment.
///
/// ```
/// use phalanx_ir::{Builder, DType, Init};
/// use phalanx_models::Chain;
///
/// let layer = |input: bool| {
///     let b = Builder::new("layer", DType::F32);
///     let x = match input {
///         true => b.data("x", DType::F32, [8, 4]),
///         false => b.boundary("h", [8, 4]),
///     };
///     b.output("h", x.matmul(b.param("w", [4, 4])).tanh());
///     b
/// };
/// let mut chain = Chain::new("deep");
/// for i in 0..5 {
///     chain.under(&format!("layers.{i}"), layer(i == 0), |_| Init::Normal(0.5))?;
/// }
/// let model = chain.finish();
/// assert_eq!(model.params()[3].name, "layers.3.w");
/// assert_eq!(model.segments().len(), 2); // the last four instances share a program
/// # Ok::<(), phalanx_ir::IrError>(())
/// ```
#[derive(Debug)]
pub struct Chain {
    model: Model,
}

impl Chain {
    /// A model of this name, still empty.
    pub fn new(name: &str) -> Self {
        Self { model: Model::new(name) }
    }

    /// Appends a segment whose parameters the model knows by the segment's own names. A name that
    /// an earlier segment used means the same parameter: that is how weights are tied.
    pub fn once(&mut self, segment: Builder, init: impl Fn(&str) -> Init) -> Result<(), IrError> {
        let program = segment.finish()?;
        let name = program.name.clone();
        self.append(&name, "", program, &[], init)
    }

    /// Appends a segment as the instance `prefix`; the model knows its parameter `w` as `prefix.w`.
    /// Equal segments share one program.
    pub fn under(
        &mut self,
        prefix: &str,
        segment: Builder,
        init: impl Fn(&str) -> Init,
    ) -> Result<(), IrError> {
        self.append(prefix, &format!("{prefix}."), segment.finish()?, &[], init)
    }

    /// Appends a segment `count` times, as the instances `prefix.0`, `prefix.1`, …
    pub fn repeat(
        &mut self,
        prefix: &str,
        count: usize,
        segment: Builder,
        init: impl Fn(&str) -> Init,
    ) -> Result<(), IrError> {
        self.repeat_sharing(prefix, count, segment, &[], init)
    }

    /// The same, where all instances share some parameters: by the segment's own names, and those that the
    /// model knows.
    pub fn repeat_sharing(
        &mut self,
        prefix: &str,
        count: usize,
        segment: Builder,
        shared: &[(&str, &str)],
        init: impl Fn(&str) -> Init,
    ) -> Result<(), IrError> {
        let program = segment.finish()?;
        for i in 0..count {
            let name = format!("{prefix}.{i}");
            self.append(&name, &format!("{name}."), program.clone(), shared, &init)?;
        }
        Ok(())
    }

    /// The model.
    pub fn finish(self) -> Model {
        self.model
    }

    /// `init` says how a parameter starts, by its local name. Weight decay is for matrices alone:
    /// pulling norms and biases towards zero has no use as a regulariser.
    fn append(
        &mut self,
        instance: &str,
        prefix: &str,
        program: Program,
        shared: &[(&str, &str)],
        init: impl Fn(&str) -> Init,
    ) -> Result<(), IrError> {
        let mut params = BTreeMap::new();
        for port in program.inputs_with(Role::Param) {
            let shape = program.ty(port.value).shape.clone();
            let known = shared.iter().find(|(own, _)| *own == port.name);
            let number = self.model.param(Param {
                name: match known {
                    Some((_, name)) => (*name).to_owned(),
                    None => format!("{prefix}{}", port.name),
                },
                decay: shape.len() > 1,
                init: init(&port.name),
                dealt: 1,
                shape,
            })?;
            params.insert(port.name.clone(), number);
        }
        let known = self.model.segments().iter().position(|s| *s == program);
        let segment = known.unwrap_or_else(|| self.model.segment(program));
        self.model.append(instance, segment, params)
    }
}
