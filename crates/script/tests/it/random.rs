//! Random scripts over several lanes, as the planner sees them: reads, writes, sizes and lanes.

use phalanx_ir::random::Stream;
use phalanx_ir::{Builder, DType, Program};
use phalanx_script::action::Entry;
use phalanx_script::{
    Action, Buffer, BufferId, BufferKey, Category, Kind, Lane, Placed, ProgramId, Run, Script,
    Slots, Source, Tier, View, Write,
};

const LANES: [Lane; 4] = [Lane::Compute, Lane::Gather, Lane::Send, Lane::Down];

struct Draw {
    stream: Stream,
    count: u64,
}

impl Draw {
    fn below(&mut self, bound: usize) -> usize {
        self.count += 1;
        self.stream.below(self.count, bound as u64) as usize
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}

/// A script that reads only what was written, with workspaces of made-up sizes.
pub(crate) fn script(seed: u64) -> Script {
    let mut draw = Draw { stream: Stream::named(seed, "actions"), count: 0 };
    script_of(seed, 4 + draw.below(28))
}

/// The same with so many actions.
pub(crate) fn script_of(seed: u64, actions: usize) -> Script {
    let stream = Stream::named(seed, "script");
    let mut draw = Draw { stream, count: 0 };
    let mut script = Script::default();
    for extent in [0, 64, 192] {
        let slots = Slots { extent, peak: extent * 3 / 4, ..Slots::default() };
        let program = nothing();
        let placed = Placed::new(program, slots);
        script.programs.push(Entry { placed, ranks: [0].into() });
    }
    let mut written: Vec<BufferId> = Vec::new();
    for _ in 0..draw.below(4) {
        let source = [Source::State, Source::Host][draw.below(2)];
        written.push(buffer(&mut script, &mut draw, source));
    }
    for index in 0..actions {
        let mut inputs: Vec<BufferId> = Vec::new();
        for _ in 0..draw.below(3).min(written.len()) {
            inputs.push(written[draw.below(written.len())]);
        }
        let mut outputs: Vec<BufferId> = Vec::new();
        for _ in 0..1 + draw.below(2) {
            let old = !written.is_empty() && draw.chance(25);
            let source = match draw.chance(90) {
                true => Source::Script,
                false => Source::Result,
            };
            let id = match old {
                true => written[draw.below(written.len())],
                false => buffer(&mut script, &mut draw, source),
            };
            outputs.push(id);
        }
        let action = action(&mut draw, index, &inputs, &outputs);
        script.actions.push(action);
        written.extend(outputs);
    }
    script
}

fn action(draw: &mut Draw, index: usize, inputs: &[BufferId], outputs: &[BufferId]) -> Action {
    let view = |&buffer: &BufferId| View { buffer, offset: 0 };
    let run = Run {
        program: ProgramId(draw.below(3)),
        inputs: inputs.iter().map(view).collect(),
        outputs: outputs.iter().map(|b| (view(b), Write::Overwrite)).collect(),
        contributes: vec![],
    };
    let after = match index > 0 && draw.chance(20) {
        true => vec![draw.below(index)],
        false => vec![],
    };
    Action {
        label: format!("action {index}"),
        lane: LANES[draw.below(LANES.len())],
        kind: Kind::Run(run),
        after,
    }
}

fn buffer(script: &mut Script, draw: &mut Draw, source: Source) -> BufferId {
    let name = format!("b{}", script.buffers.len());
    let category = Category::ALL[draw.below(Category::ALL.len())];
    let bytes = 1 + draw.below(500);
    let (key, tier) = (BufferKey::Own(name.into()), Tier::Device);
    script.buffer(Buffer { key, category, bytes, source, tier, padding: vec![] })
}

fn nothing() -> Program {
    Builder::new("nothing", DType::F32).finish().unwrap()
}
