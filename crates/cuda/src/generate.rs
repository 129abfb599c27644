//! CUDA C for a group of elementwise ops.
//!
//! A thread takes a few neighbouring elements through all steps; intermediate values stay in
//! registers. Each step rounds to its element type, so a group gives the bits of separate ops.

use std::fmt::Write;

use phalanx_ir::ops::{BinaryKind, CompareKind, FusedArg, FusedStep, UnaryKind};
use phalanx_ir::random::fnv1a;
use phalanx_ir::{DType, Op, OpDef};

use crate::kernels::{KernelSpec, Source, is_narrow, type_name};

/// How an operand's elements follow those of the results.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Repeat {
    /// One for each.
    Full,
    /// The same for all.
    Single,
    /// It begins again after as many elements as it has.
    Periodic,
}

/// A group as it is generated.
pub(crate) struct Group<'a> {
    /// Element types of the operands, and how they are repeated.
    pub(crate) inputs: &'a [(DType, Repeat)],
    pub(crate) steps: &'a [FusedStep],
    /// The steps that are results.
    pub(crate) results: &'a [usize],
}

impl Group<'_> {
    /// Its kernel. The parameters: each operand's address, after that of a periodic one its number of
    /// elements; each result's address and whether it is added to; the number of elements. Says why
    /// there is none if a step has no kernel.
    pub(crate) fn kernel(&self) -> Result<KernelSpec, String> {
        let body = format!("{}{}", self.step()?, self.function());
        let entry = format!("group_{:016x}", fnv1a(body.as_bytes()));
        let text = body.replace("GROUP", &entry);
        let source = Source::Elementwise;
        let steps: Vec<&str> = self.steps.iter().map(|step| step.op.name()).collect();
        let title = format!("group of {}", steps.join(", "));
        Ok(KernelSpec { source, entry, title, generated: Some(text), shared: 0 })
    }

    /// The kernel of a group of operands of the full shape, of one type of 16 bits, and one result, which is not
    /// added to, that also sums the result's columns in parts. The parameters: the operands' addresses, the result's,
    /// that of the parts; rows, columns and the number of parts.
    pub(crate) fn kernel_with_sum(&self) -> Result<KernelSpec, String> {
        let body = format!("{}{}", self.step()?, self.column_function());
        let entry = format!("group_{:016x}", fnv1a(body.as_bytes()));
        let text = body.replace("GROUP", &entry);
        let steps: Vec<&str> = self.steps.iter().map(|step| step.op.name()).collect();
        let title = format!("group of {}, sum of columns", steps.join(", "));
        Ok(KernelSpec { source: Source::Reduce, entry, title, generated: Some(text), shared: 0 })
    }

    /// Eight columns of a thread, eight rows of a part side by side, as in `reduce_columns`.
    fn column_function(&self) -> String {
        let operands = 0..self.inputs.len();
        let each = |f: &dyn Fn(usize) -> String, between: &str| {
            operands.clone().map(f).collect::<Vec<_>>().join(between)
        };
        let name = type_name(self.steps[0].dtype);
        let parameters = each(&|i| format!("const {name}* a{i}"), ", ");
        let loads = each(
            &|i| format!("Wide<{name}> x{i} = *(const Wide<{name}>*)(a{i} + at);"),
            "\n            ",
        );
        let values = each(&|i| format!("x{i}.element(e)"), ", ");
        format!(
            "__global__ void __launch_bounds__(256, 4) GROUP({parameters}, {name}* o, double* partial, \
             i64 rows, i64 columns, i64 parts) {{
    i64 column = ((i64)blockIdx.x * 32 + threadIdx.x % 32) * 8;
    float total[8];
    for (int e = 0; e < 8; e++) total[e] = 0.0f;
    if (column < columns) {{
#pragma unroll 2
        for (i64 row = (i64)blockIdx.y * 8 + threadIdx.x / 32; row < rows; row += parts * 8) {{
            i64 at = row * columns + column;
            {loads}
            Wide<{name}> y;
            float values[8];
#pragma unroll
            for (int e = 0; e < 8; e++) {{
                {name} rounded;
                GROUP_of({values}, rounded);
                values[e] = load(rounded);
                total[e] += values[e];
            }}
            y.put(values);
            store_wide(o + at, y);
        }}
    }}
    store_part<TOTAL, 8>(total, partial, columns);
}}
"
        )
    }

    /// How many neighbours a thread takes: at most 16 bytes of the widest type.
    pub(crate) fn wide(&self) -> usize {
        let inputs = self.inputs.iter().map(|(dtype, _)| dtype.size());
        let results = self.results.iter().map(|&i| self.steps[i].dtype.size());
        16 / inputs.chain(results).max().unwrap_or(8)
    }

    fn dtype(&self, arg: FusedArg) -> DType {
        match arg {
            FusedArg::Input(i) => self.inputs[i].0,
            FusedArg::Step(i) => self.steps[i].dtype,
        }
    }

    /// The function of one element.
    fn step(&self) -> Result<String, String> {
        let mut text = String::from("__device__ __forceinline__ void GROUP_of(");
        let inputs = self.inputs.iter().enumerate();
        let mut parameters: Vec<String> =
            inputs.map(|(i, (dtype, _))| format!("{} i{i}", type_name(*dtype))).collect();
        let results = self.results.iter().enumerate();
        let result =
            |(i, step): (usize, &usize)| format!("{}& r{i}", type_name(self.steps[*step].dtype));
        parameters.extend(results.map(result));
        let _ = writeln!(text, "{}) {{", parameters.join(", "));
        for (index, step) in self.steps.iter().enumerate() {
            let value = self.expression(step)?;
            let _ = writeln!(text, "    {} s{index} = {value};", type_name(step.dtype));
        }
        for (i, step) in self.results.iter().enumerate() {
            let _ = writeln!(text, "    r{i} = s{step};");
        }
        text.push_str("}\n");
        Ok(text)
    }

    /// The value of a step.
    fn expression(&self, step: &FusedStep) -> Result<String, String> {
        // It computes in the type of its last operand; a condition comes first.
        let operand = step.args.last().map_or(step.dtype, |&arg| self.dtype(arg));
        let moves = matches!(step.op, Op::Cast(_) | Op::Compare(_));
        if !(operand.is_float() || moves) {
            return Err(format!("it has no kernel for {operand}"));
        }
        let acc = type_name(operand.accumulator());
        let raw = |i: usize| match step.args[i] {
            FusedArg::Input(i) => format!("i{i}"),
            FusedArg::Step(i) => format!("s{i}"),
        };
        let arg = |i: usize| format!("load({})", raw(i));
        let constant = |x: f64| format!("{acc}(__longlong_as_double(0x{:016x}ll))", x.to_bits());
        let [functions, slopes] = match step.dtype {
            dtype if is_narrow(dtype) => ["QuickFunctions".to_owned(), "QuickSlopes".to_owned()],
            _ => [format!("Functions<{acc}>"), format!("Slopes<{acc}>")],
        };
        let computed = match &step.op {
            Op::Unary(u) => format!("{functions}::{}({})", function(u.kind), arg(0)),
            Op::UnaryGrad(u) => format!("{slopes}::{}({}) * {}", function(u.kind), arg(0), arg(1)),
            Op::Binary(b) => binary(b.kind, &arg(0), &arg(1)),
            Op::Scale(s) => format!("{} * {}", arg(0), constant(s.by)),
            Op::Shift(s) => format!("{} + {}", arg(0), constant(s.by)),
            Op::Compare(c) => {
                return Ok(format!("(u8)({} {} {})", arg(0), comparison(c.kind), arg(1)));
            }
            Op::Select(_) => return Ok(format!("{} ? {} : {}", raw(0), raw(1), raw(2))),
            Op::Cast(c) => return Ok(format!("To<{}>::of({})", type_name(c.to), arg(0))),
            other => return Err(format!("{} is not elementwise", other.variant())),
        };
        Ok(format!("Store<{}>::of({computed})", type_name(step.dtype)))
    }

    /// The kernel that walks over the elements, several at a time where all addresses allow it.
    fn function(&self) -> String {
        let wide = self.wide();
        let mut parameters = Vec::new();
        let mut fits = vec![format!("count % {wide} == 0")];
        for (i, (dtype, repeat)) in self.inputs.iter().enumerate() {
            parameters.push(format!("const {}* a{i}", type_name(*dtype)));
            if *repeat == Repeat::Periodic {
                parameters.push(format!("i64 n{i}"));
                fits.push(format!("n{i} % {wide} == 0"));
            }
            if *repeat != Repeat::Single {
                fits.push(format!("aligned(a{i}, {})", wide * dtype.size()));
            }
        }
        for (i, &step) in self.results.iter().enumerate() {
            let dtype = self.steps[step].dtype;
            parameters.push(format!("{}* o{i}, i64 add{i}", type_name(dtype)));
            fits.push(format!("aligned(o{i}, {})", wide * dtype.size()));
        }
        parameters.push("i64 count".to_owned());
        format!(
            "__global__ void GROUP({}) {{\n    if ({}) {{\n{}    }} else {{\n{}    }}\n}}\n",
            parameters.join(", "),
            fits.join(" && "),
            self.walk(wide),
            self.walk(1)
        )
    }

    fn walk(&self, wide: usize) -> String {
        let mut text = format!(
            "        for (u64 i = thread_index() * {wide}; i < (u64)count; \
             i += thread_count() * {wide}) {{\n"
        );
        let mut line = |line: String| {
            let _ = writeln!(text, "            {line}");
        };
        let mut values = Vec::new();
        for (i, (dtype, repeat)) in self.inputs.iter().enumerate() {
            let name = type_name(*dtype);
            let at = match repeat {
                Repeat::Single => {
                    line(format!("{name} x{i} = a{i}[0];"));
                    values.push(format!("x{i}"));
                    continue;
                }
                Repeat::Full => "i".to_owned(),
                Repeat::Periodic => {
                    format!("((u64)count >> 32 ? i % (u64)n{i} : (u32)i % (u32)n{i})")
                }
            };
            line(format!(
                "Pack<{name}, {wide}> x{i} = *(const Pack<{name}, {wide}>*)(a{i} + {at});"
            ));
            values.push(format!("x{i}.at[e]"));
        }
        for (i, &step) in self.results.iter().enumerate() {
            line(format!("Pack<{}, {wide}> y{i};", type_name(self.steps[step].dtype)));
            values.push(format!("y{i}.at[e]"));
        }
        line(format!("for (int e = 0; e < {wide}; e++) GROUP_of({});", values.join(", ")));
        for (i, &step) in self.results.iter().enumerate() {
            let dtype = self.steps[step].dtype;
            let name = type_name(dtype);
            let place = format!("*(Pack<{name}, {wide}>*)(o{i} + i)");
            if dtype.is_float() {
                line(format!(
                    "if (add{i}) {{ Pack<{name}, {wide}> old = {place}; for (int e = 0; e < {wide}; e++) \
                     y{i}.at[e] = Store<{name}>::of(load(old.at[e]) + load(y{i}.at[e])); }}"
                ));
            }
            line(format!("{place} = y{i};"));
        }
        text.push_str("        }\n");
        text
    }
}

const fn function(kind: UnaryKind) -> &'static str {
    match kind {
        UnaryKind::Neg => "neg",
        UnaryKind::Exp => "exp",
        UnaryKind::Log => "log",
        UnaryKind::Sqrt => "sqrt",
        UnaryKind::Rsqrt => "rsqrt",
        UnaryKind::Recip => "recip",
        UnaryKind::Square => "square",
        UnaryKind::Tanh => "tanh",
        UnaryKind::Sigmoid => "sigmoid",
        UnaryKind::Relu => "relu",
        UnaryKind::Gelu => "gelu",
        UnaryKind::GeluErf => "gelu_erf",
        UnaryKind::Silu => "silu",
        UnaryKind::Softplus => "softplus",
    }
}

fn binary(kind: BinaryKind, a: &str, b: &str) -> String {
    let sign = match kind {
        BinaryKind::Add => "+",
        BinaryKind::Sub => "-",
        BinaryKind::Mul => "*",
        BinaryKind::Div => "/",
        BinaryKind::Max => return format!("either_nan({a}, {b}, {a} > {b} ? {a} : {b})"),
        BinaryKind::Min => return format!("either_nan({a}, {b}, {a} < {b} ? {a} : {b})"),
    };
    format!("{a} {sign} {b}")
}

const fn comparison(kind: CompareKind) -> &'static str {
    match kind {
        CompareKind::Eq => "==",
        CompareKind::Ne => "!=",
        CompareKind::Lt => "<",
        CompareKind::Le => "<=",
        CompareKind::Gt => ">",
        CompareKind::Ge => ">=",
    }
}
