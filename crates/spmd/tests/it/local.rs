//! Segments in local form: the exchanges that are written down are those that are made, and numbers are those of one rank.

use phalanx_autodiff::joint;
use phalanx_ir::{Builder, DType, Init, IrError, Mesh, Model, OpDef, Phase, Program};
use phalanx_models::{Chain, LocalForm};
use phalanx_spmd::strategies::{BatchParallel, Megatron, Sequence};
use phalanx_spmd::{Costs, Strategy, apply, partition};
use phalanx_testing::checks::on_simulated_ranks;

const RANKS: usize = 2;

/// Megatron's feed-forward part by hand.
fn columns_then_rows(b: &Builder) -> Result<(), IrError> {
    let local = LocalForm::new(b, "tp", RANKS);
    let x = local.same(b.boundary("h", [4, 6, 8]));
    let (up, down) = (local.own_param("up", &[8, 6])?, local.own_param("down", &[6, 8])?);
    let y = x.matmul(up)?.gelu().matmul(down)?.sum_ranks()?;
    b.output("h", x.plus(y)?.leave()?);
    Ok(())
}

/// The same with a stream that is cut along the sequence.
fn with_a_cut_stream(b: &Builder) -> Result<(), IrError> {
    let local = LocalForm::new(b, "tp", RANKS);
    let x = local.block(b.boundary("h", [4, 6, 8]), 1)?;
    let (up, down) = (local.own_param("up", &[8, 6])?, local.own_param("down", &[6, 8])?);
    let y = x.gather(1)?.matmul(up)?.gelu().matmul(down)?.scatter_sum(1)?;
    b.output("h", x.plus(y)?.gather(1)?.leave()?);
    Ok(())
}

/// Something that no layout of a whole program is: each rank norms what it has of the width. Then sequences and widths
/// change places.
fn norms_of_blocks(b: &Builder) -> Result<(), IrError> {
    let local = LocalForm::new(b, "tp", RANKS);
    let x = local.block(b.boundary("h", [4, 6, 8]), 2)?;
    let normed = x.rms_norm(b.param("gain", [4]), 1e-5);
    let rows = normed.exchange(1, 2)?.softmax();
    let whole = rows.exchange(2, 1)?.times(x)?.gather(2)?;
    b.output("h", whole.leave()?);
    Ok(())
}

/// A model whose second segment is in local form, between two that are not.
fn model(write: fn(&Builder) -> Result<(), IrError>) -> Model {
    let mut chain = Chain::new("model");
    for name in ["before", "local", "after"] {
        let b = Builder::new(name, DType::F64);
        match name {
            "local" => write(&b).unwrap(),
            "before" => {
                let x = b.data("x", DType::F64, [4, 6, 8]);
                b.output("h", x.matmul(b.param("w", [8, 8])));
            }
            _ => {
                let h = b.boundary("h", [4, 6, 8]).matmul(b.param("v", [8, 8]));
                b.loss("loss", h.square().sum_all());
            }
        }
        chain.once(b, |_| Init::Normal(1.0)).unwrap();
    }
    chain.finish()
}

/// The joint program of the segment in local form on the mesh. The numbers of all segments are those of one rank.
fn made(write: fn(&Builder) -> Result<(), IrError>, mesh: &str, by: &[&dyn Strategy]) -> Program {
    let (model, mesh) = (model(write), mesh.parse::<Mesh>().unwrap());
    let (mesh, annotations) = apply(&model, &mesh, by).unwrap();
    let mut programs = Vec::new();
    for (forward, annotations) in model.segments().iter().zip(&annotations) {
        let whole = joint(forward, DType::F64).unwrap();
        let parts = partition(&whole, &mesh, annotations, &Costs::default()).unwrap();
        on_simulated_ranks(&whole, &parts, 7).unwrap();
        programs.push(parts.program);
    }
    programs.swap_remove(1)
}

/// The collectives over `tp` of a forward, in order.
fn exchanges(program: &Program) -> Vec<&str> {
    let forward = program.instrs().iter().filter(|instr| instr.phase == Phase::F);
    let names = forward.map(|instr| instr.op.name());
    let known = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"];
    names.filter(|name| known.contains(name)).collect()
}

#[test]
fn what_is_written_down_is_what_is_moved() {
    let (data, sp) = (BatchParallel::default(), Sequence::default());
    let program = made(columns_then_rows, "tp=2", &[]);
    assert_eq!(exchanges(&program), ["all_reduce"]);
    let program = made(with_a_cut_stream, "tp=2", &[&sp]);
    assert_eq!(exchanges(&program), ["all_gather", "reduce_scatter"]);
    let program = made(norms_of_blocks, "tp=2", &[]);
    let moved = exchanges(&program);
    assert_eq!(moved.iter().filter(|name| **name == "all_to_all").count(), 2, "{moved:?}");
    // Other axes divide such a segment as they divide any other.
    for write in [columns_then_rows, with_a_cut_stream, norms_of_blocks] {
        made(write, "dp=2 tp=2", &[&data]);
        made(write, "dp=2", &[&data]);
    }
}

/// Strategies of the axis decide what enters and leaves, not what lies between; and the number of ranks need not be
/// that of the mesh.
#[test]
fn strategies_of_the_axis_leave_the_code_alone() {
    let (tp, sp) = (Megatron::default(), Sequence::default());
    for write in [columns_then_rows, with_a_cut_stream, norms_of_blocks] {
        for mesh in ["tp=2", "tp=3", "tp=4"] {
            made(write, mesh, &[&tp]);
            made(write, mesh, &[&tp, &sp]);
        }
    }
}

/// A note that is none is told with the value.
#[test]
fn notes_of_local_form_are_read() {
    let write = |b: &Builder| {
        b.output("h", b.boundary("h", [4, 6, 8]).scale(2.0).annotate("tp ..."));
        Ok(())
    };
    let error = apply(&model(write), &"tp=2".parse().unwrap(), &[]).err().unwrap();
    assert!(error.to_string().contains("`tp` is neither DIM:AXIS nor -:AXIS"), "{error}");
}
