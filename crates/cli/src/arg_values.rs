//! Values of arguments, as they are written on a command line.

use std::num::NonZeroUsize;
use std::str::FromStr;

use clap::ValueEnum;
use phalanx::ir::DType;
use phalanx::script::Part;
use phalanx::session::hosts::HostShare;

/// Token ids as they are written on a command line.
#[derive(Clone, Debug)]
pub(crate) struct Ids(pub(crate) Vec<i32>);

impl FromStr for Ids {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let id = |id: &str| {
            let found = id.trim();
            found.parse().map_err(|_| match found {
                "" => "an id is missing; write whole numbers and commas, such as 5,17".to_owned(),
                _ => format!("`{found}` is not a token id; write whole numbers, such as 5,17"),
            })
        };
        text.split(',').map(id).collect::<Result<_, _>>().map(Ids)
    }
}

/// Where ranks meet, as it is written on a command line.
#[derive(Clone, Debug)]
pub(crate) struct Meet {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl FromStr for Meet {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
        let most = u16::MAX - HostShare::PORTS;
        match parts {
            Some((host, port)) if !host.is_empty() && (1..=most).contains(&port) => {
                Ok(Self { host: host.to_owned(), port })
            }
            _ => Err(format!("write a host and a port up to {most}, such as host-a:29500")),
        }
    }
}

/// A whole number, 0 or more.
pub(crate) fn whole(text: &str) -> Result<usize, String> {
    text.trim().parse().map_err(|_| "write a whole number, such as 4".to_owned())
}

/// A whole number, 1 or more.
pub(crate) fn count(text: &str) -> Result<NonZeroUsize, String> {
    let number = whole(text).ok().and_then(NonZeroUsize::new);
    number.ok_or_else(|| "write a whole number, 1 or more".to_owned())
}

/// A part of a segment.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[value(rename_all = "UPPER")]
pub(crate) enum PartArg {
    F,
    B,
    W,
    Bw,
    Fbw,
}

impl From<PartArg> for Part {
    fn from(part: PartArg) -> Part {
        match part {
            PartArg::F => Part::F,
            PartArg::B => Part::B,
            PartArg::W => Part::W,
            PartArg::Bw => Part::BW,
            PartArg::Fbw => Part::FBW,
        }
    }
}

/// An element type of exported weights.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Dtype {
    F64,
    F32,
    Bf16,
    F16,
}

impl From<Dtype> for DType {
    fn from(dtype: Dtype) -> DType {
        match dtype {
            Dtype::F64 => DType::F64,
            Dtype::F32 => DType::F32,
            Dtype::Bf16 => DType::Bf16,
            Dtype::F16 => DType::F16,
        }
    }
}
