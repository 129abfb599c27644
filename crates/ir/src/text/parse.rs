//! Reading programs back.

use std::collections::HashMap;

use crate::attr::AttrReader;
use crate::error::IrError;
use crate::mesh::Mesh;
use crate::ops::Op;
use crate::program::{Phase, Port, Program, Role, ValueId};
use crate::types::TensorType;

use super::print::COMMENT;

/// Reads a program as it prints. Types are taken as written; run the verifier to check them.
pub fn parse(text: &str) -> Result<Program, IrError> {
    let mut lines = text.lines().enumerate().map(|(i, l)| (i + 1, code(l)));
    let mut lines = lines.by_ref().filter(|(_, l)| !l.is_empty() && !l.starts_with("//"));
    let (line, mesh) = lines.next().ok_or_else(|| bad(0, "the text is empty"))?;
    let mesh = mesh.strip_prefix("mesh").ok_or_else(|| bad(line, "expected `mesh …`"))?;
    let mesh: Mesh = mesh.trim().parse()?;
    let (line, head) = lines.next().ok_or_else(|| bad(line, "expected `program name {`"))?;
    let name = (head.strip_prefix("program "))
        .and_then(|h| h.strip_suffix('{'))
        .ok_or_else(|| bad(line, "expected `program name {`"))?;
    let mut reader = Reader { program: Program::new(name.trim(), mesh), names: HashMap::new() };
    for (line, text) in lines {
        if text == "}" {
            return Ok(reader.program);
        }
        reader.line(text).map_err(|what| bad(line, what))?;
    }
    Err(bad(text.lines().count(), "expected `}`"))
}

/// A line without its comment.
fn code(line: &str) -> &str {
    line.split_once(COMMENT).map_or(line, |(code, _)| code).trim()
}

fn bad(line: usize, what: impl Into<String>) -> IrError {
    IrError::Text { line, what: what.into() }
}

struct Reader {
    program: Program,
    names: HashMap<String, ValueId>,
}

impl Reader {
    fn line(&mut self, text: &str) -> Result<(), String> {
        if let Some(rest) = text.strip_prefix("return ") {
            let (port, value) = port(rest)?;
            let value = self.value(value)?;
            self.program.output_like(&port, value);
            return Ok(());
        }
        if let Some(rest) = text.strip_prefix("note ") {
            let (value, layout) = rest.split_once(" {").ok_or("expected `note value {layout}`")?;
            let layout = layout.strip_suffix('}').ok_or("expected `}`")?;
            let value = self.value(value)?;
            self.program.note(value, layout);
            return Ok(());
        }
        if let Some((results, rest)) = text.split_once(" = ") {
            return self.instr(results, rest);
        }
        let (port, ty) = port(text)?;
        let ty = self.ty(ty)?;
        let value = self.program.input_like(&port, ty);
        self.names.insert(port.name, value);
        Ok(())
    }

    fn instr(&mut self, results: &str, rest: &str) -> Result<(), String> {
        let (rest, phase) = match rest.rsplit_once(" @") {
            Some((rest, "B")) => (rest, Phase::B),
            Some((rest, "W")) => (rest, Phase::W),
            _ => (rest, Phase::F),
        };
        let (call, types) = rest.split_once(" : ").ok_or("expected ` : type`")?;
        let types = split_types(types).into_iter().map(|t| self.ty(t)).collect::<Result<_, _>>()?;
        let (head, args) = call
            .split_once('(')
            .and_then(|(head, args)| Some((head, args.strip_suffix(')')?)))
            .ok_or("expected `op(operands)`")?;
        let (name, axes) = match head.split_once('<') {
            Some((name, axes)) => (name, axes.strip_suffix('>').ok_or("expected `>`")?),
            None => (head, ""),
        };
        let mut atoms = Vec::new();
        for axis in axes.split(',').filter(|a| !a.is_empty()) {
            atoms.extend(self.program.mesh().expand(axis).map_err(|e| e.to_string())?);
        }
        let mut operands = Vec::new();
        let mut pairs = Vec::new();
        for arg in args.split(", ").filter(|a| !a.is_empty()) {
            match arg.split_once('=') {
                Some(pair) => pairs.push(pair),
                None => operands.push(self.value(arg)?),
            }
        }
        let mut attrs = AttrReader::new(pairs);
        let op = Op::read(name, atoms, &mut attrs)?;
        attrs.finish()?;
        let values = self.program.push_unchecked(op, &operands, types, phase);
        let names: Vec<&str> = results.split(", ").collect();
        if names.len() != values.len() {
            return Err(format!("there are {} names for {} results", names.len(), values.len()));
        }
        for (name, value) in names.into_iter().zip(values) {
            self.names.insert(name.to_owned(), value);
        }
        Ok(())
    }

    fn value(&self, name: &str) -> Result<ValueId, String> {
        self.names
            .get(name)
            .copied()
            .ok_or_else(|| format!("there is no value `{name}` before this line"))
    }

    fn ty(&self, text: &str) -> Result<TensorType, String> {
        TensorType::parse(text, self.program.mesh()).map_err(|e| e.to_string())
    }
}

/// `name: role rest`, or `name: role of boundary rest`; the caller fills in the value.
fn port(text: &str) -> Result<(Port, &str), String> {
    let (name, rest) = text.split_once(": ").ok_or("expected `name: role type`")?;
    let (role, rest) = rest.split_once(' ').ok_or("expected `role type`")?;
    let role = (Role::ALL.into_iter().find(|r| r.name() == role))
        .ok_or_else(|| format!("unknown role `{role}`"))?;
    let (of, rest) = match rest.strip_prefix("of ") {
        Some(rest) => {
            let (of, rest) = rest.split_once(' ').ok_or("expected `of boundary type`")?;
            (Some(of.to_owned()), rest)
        }
        None => (None, rest),
    };
    Ok((Port { name: name.to_owned(), value: ValueId(u32::MAX), role, of }, rest))
}

/// Splits `f32[8,4], f32[8]{0:a,b}` at the commas between types: those followed by a space.
fn split_types(text: &str) -> Vec<&str> {
    text.split(", ").filter(|t| !t.is_empty()).collect()
}
