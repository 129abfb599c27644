//! Weights of a session: read from disk, written, and seen as any other weights.

use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use phalanx_error::Result;
use phalanx_ir::{DType, Param};
use phalanx_models::hf::{self, HfError, TensorInfo, WeightTensor, Weights};
use phalanx_session::Session;

use crate::mistake::Mistake;

/// Opens a file of weights, or a Hugging Face folder, that has all these parameters.
pub(crate) fn open(path: &Path, params: &[Param]) -> Result<Box<dyn Weights>> {
    let weights: Box<dyn Weights> = match path.is_dir() {
        true => Box::new(hf::ModelFolder::open(path)?),
        false => Box::new(hf::Params::open(path)?),
    };
    let from = path.display().to_string();
    for Param { name, shape, .. } in params {
        let Ok(TensorInfo { shape: found, .. }) = weights.layout(name) else {
            return Err(Mistake::MissingParam { from, name: name.clone() }.into());
        };
        if found != *shape {
            let (name, expected) = (name.clone(), shape.clone());
            return Err(Mistake::OtherShape { from, name, found, expected }.into());
        }
    }
    Ok(weights)
}

/// The index of a parameter.
pub(crate) fn find(params: &[Param], name: &str) -> Result<usize> {
    let found = params.iter().position(|param| param.name == name);
    found.ok_or_else(|| {
        let known = params.iter().map(|param| param.name.clone()).collect();
        Mistake::NoParam { name: name.to_owned(), known }.into()
    })
}

/// The weights of a session, in full precision. Reading them is a command to its ranks.
pub(crate) struct Live<'s> {
    params: Vec<Param>,
    dtype: DType,
    session: Mutex<&'s mut Session>,
}

impl<'s> Live<'s> {
    pub(crate) fn new(session: &'s mut Session) -> Self {
        let (params, dtype) = (session.parameters().to_vec(), session.state_dtype());
        Self { params, dtype, session: Mutex::new(session) }
    }

    fn unread(name: &str, found: String) -> HfError {
        let (path, tensor) = (Path::new("the weights in training").into(), name.to_owned());
        HfError::Tensor { path, tensor, found, expected: "one of the model's".to_owned() }
    }
}

impl Weights for Live<'_> {
    fn layouts(&self) -> Vec<TensorInfo> {
        let info = |param: &Param| {
            let Param { name, shape, .. } = param.clone();
            TensorInfo { name, shape, dtype: self.dtype }
        };
        let mut all: Vec<TensorInfo> = self.params.iter().map(info).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    fn layout(&self, name: &str) -> Result<TensorInfo, HfError> {
        let mut all = self.layouts().into_iter();
        all.find(|info| info.name == name)
            .ok_or_else(|| Self::unread(name, "no such parameter".to_owned()))
    }

    fn read_ranges(
        &self,
        name: &str,
        ranges: &[Range<usize>],
        dtype: DType,
    ) -> Result<Vec<u8>, HfError> {
        let told = |error: phalanx_error::Error| Self::unread(name, error.to_string());
        let param = find(&self.params, name).map_err(told)?;
        let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        let mut out = Vec::new();
        for range in ranges {
            let (own, bytes) = session.read_param(param, range.clone()).map_err(told)?;
            let tensor = WeightTensor::from_bytes([range.len()], own, &bytes);
            let bytes = tensor.to_bytes(0..range.len(), dtype);
            out.extend(bytes.ok_or_else(|| Self::unread(name, format!("{range:?}")))?);
        }
        Ok(out)
    }
}
