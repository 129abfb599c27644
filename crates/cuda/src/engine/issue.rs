//! Issuing the tasks of a program, and what was started and has not ended.

use phalanx_comm::Communicator;
use phalanx_engine::{Args, EngineError, Event};

use super::compile::What;
use super::staging::{InFlight, Staged};
use super::{CudaEngine, CudaKernel, MEMORY};
use crate::error::CudaError;
use crate::tasks::{Extent, Place, Run, Task, Transfer};

impl CudaEngine {
    /// Issues the tasks of some instructions of a kernel.
    pub(super) fn issue(
        &mut self,
        kernel: &CudaKernel,
        args: &Args<'_>,
        chosen: impl Fn(usize) -> bool,
    ) -> Result<(), EngineError> {
        match &kernel.what {
            What::Copy => self.copy_between(args, &kernel.name),
            What::Task(task) => {
                self.join_beside()?;
                self.task(task, args, &kernel.name)
            }
            What::Program(tasks) => {
                tasks.iter().filter(|(instr, _)| chosen(*instr)).try_for_each(|(instr, task)| {
                    self.issue_ordered(kernel, (*instr, task), args)?;
                    self.timing.task(|| task.to_string(), &self.stream)
                })
            }
        }
    }

    pub(super) fn task(
        &mut self,
        task: &Task,
        args: &Args<'_>,
        program: &str,
    ) -> Result<(), EngineError> {
        let run = self.run(args);
        let library = &self.library;
        let issued = |done: Result<(), CudaError>| done.map_err(|error| error.during(program));
        match task {
            // SAFETY: tasks are made for their kernels and the program's slots; the planner gave
            // these values their memory, and the caller waited for what uses it on other lanes.
            Task::Kernel(kernel) => issued(unsafe { kernel.run(&run) }),
            // SAFETY: as above.
            Task::Product(product) => issued(unsafe { product.run(&run, library) }),
            Task::Attention(call) => {
                let Some(library) = &self.attention else {
                    let why = "the library of attention is not open".to_owned();
                    return Err(EngineError::Failed { program: program.to_owned(), why });
                };
                // SAFETY: as above.
                issued(unsafe { call.run(&run, library) })
            }
            Task::Copy { from, to, bytes } => {
                let (from, to) = (run.address(*from), run.address(*to));
                // SAFETY: as above; a value that is copied lies elsewhere.
                issued(unsafe { run.stream.copy(from, to, *bytes) })
            }
            Task::Clear { to, .. } if run.adds(to.slot) => Ok(()),
            Task::Clear { to, bytes } => {
                // SAFETY: as above.
                issued(unsafe { run.stream.set(run.address(*to), 0, *bytes) })
            }
            Task::Transfer(transfer) => {
                let flight = self.start(transfer, args, program)?;
                self.land(flight, program)
            }
            Task::Start(transfer, handle) => {
                let flight = self.start(transfer, args, program)?;
                self.pending.push((*handle, flight));
                Ok(())
            }
            Task::Done(handle) => {
                let at = self.pending.iter().position(|(other, _)| other == handle);
                // There is none if its start failed, which was already reported.
                let Some(at) = at else { return Ok(()) };
                let (_, flight) = self.pending.swap_remove(at);
                self.land(flight, program)
            }
        }
    }

    fn run<'a>(&'a self, args: &Args<'a>) -> Run<'a> {
        let (stream, workspace) = match self.beside.as_ref().filter(|_| self.is_beside) {
            Some(beside) => (&beside.stream, &beside.workspace),
            None => (&*self.stream, &self.workspace),
        };
        Run {
            stream,
            args: *args,
            base: self.arenas.base(),
            fault: self.fault.as_ptr() as u64,
            workspace: (workspace.address(), workspace.bytes()),
        }
    }

    /// Starts the calls of a transfer. Where they move the host's memory, what it gives is copied there first.
    pub(super) fn start(
        &mut self,
        transfer: &Transfer,
        args: &Args<'_>,
        program: &str,
    ) -> Result<InFlight, EngineError> {
        let run = self.run(args);
        let side = |(place, extent): (Place, Extent)| {
            let bytes = match (extent, place.slot) {
                (Extent::Bytes(bytes), _) => bytes,
                (Extent::Bound, phalanx_call::Slot::Input(i)) => args.inputs[i].bytes,
                (Extent::Bound, phalanx_call::Slot::Output(o)) => args.outputs[o].span.bytes,
                (Extent::Bound, _) => 0,
            };
            (run.address(place), bytes)
        };
        let (source, target) = (transfer.source.map(side), transfer.target.map(side));
        let accumulate = transfer.target.is_some_and(|(place, _)| run.adds(place.slot));
        let failed = |why: String| EngineError::Failed { program: program.to_owned(), why };
        let staged = self.messages_through_host && transfer.is_message();
        let endpoint = self.endpoint.as_ref().filter(|_| !staged);
        let device = endpoint.is_some_and(|endpoint| endpoint.comm.memory() == MEMORY);
        let mut flight = match device {
            true => InFlight::on_device(source, target),
            false => InFlight::new(&mut self.staging, source, target),
        };
        if let (Some(staged), Some((from, _))) = (&mut flight.staged, source) {
            // SAFETY: the source is this call's to read, in the order of the stream.
            unsafe { self.stream.download(from, staged.source.bytes_mut()) }
                .map_err(|error| error.during(program))?;
        }
        let reads = accumulate || transfer.partly;
        if let (Some(staged), Some((to, _)), true) = (&mut flight.staged, target, reads) {
            // SAFETY: the target is this call's to read and write, in the order of the stream.
            unsafe { self.stream.download(to, staged.target.bytes_mut()) }
                .map_err(|error| error.during(program))?;
        }
        let Some(endpoint) = &mut self.endpoint else {
            return Err(failed("this engine has no other rank to communicate with".to_owned()));
        };
        for (first, call) in &transfer.calls {
            let call = phalanx_comm::Call { accumulate, ..*call };
            let offset = first * call.dtype.size();
            let (send, receive) = flight.sides(offset);
            // SAFETY: both sides are as long as the blocks span. They are memory of the flight, which
            // nothing else uses until the calls have ended; or the values themselves, which are this
            // call's in the order of the stream.
            let handle = unsafe { endpoint.comm.start(&call, send, receive) };
            flight.handles.push(handle.map_err(|e| failed(e.to_string()))?);
        }
        Ok(flight)
    }

    /// Waits for the calls of a transfer, and copies what they brought to the GPU.
    fn land(&mut self, mut flight: InFlight, program: &str) -> Result<(), EngineError> {
        let failed = |why: String| EngineError::Failed { program: program.to_owned(), why };
        if let Some(endpoint) = &mut self.endpoint {
            for handle in flight.handles.drain(..) {
                endpoint.comm.wait(handle).map_err(|e| failed(e.to_string()))?;
            }
        }
        if let Some(Staged { target, to: Some(to), .. }) = &mut flight.staged {
            // SAFETY: the target is this call's to write, in the order of the stream.
            unsafe { self.stream.upload(*to, target.bytes_mut()) }
                .map_err(|error| error.during(program))?;
        }
        self.staging.give_back(flight);
        Ok(())
    }

    /// Ends what was started under an event.
    pub(super) fn finish(&mut self, event: Event) -> Result<(), EngineError> {
        while let Some(at) = self.started.iter().position(|(of, _)| *of == event) {
            let (_, flight) = self.started.swap_remove(at);
            self.land(flight, "a collective")?;
            self.timing.stamps.end(event);
        }
        Ok(self.copies.come_before(event, &self.stream)?)
    }

    /// Whether an event has happened, as far as is known.
    pub(super) fn has_ended(&mut self, event: Event) -> Result<bool, EngineError> {
        let Some((_, flight)) = self.started.iter().find(|(of, _)| *of == event) else {
            return Ok(event.0 <= self.waited);
        };
        let Some(endpoint) = &mut self.endpoint else { return Ok(true) };
        for handle in &flight.handles {
            let over = endpoint.comm.test(handle).map_err(|e| EngineError::Failed {
                program: "a collective".to_owned(),
                why: e.to_string(),
            })?;
            if !over {
                return Ok(false);
            }
        }
        // On a GPU it was only issued.
        Ok(flight.staged.is_some())
    }

    /// This rank's endpoint to the others, if there are any.
    pub(super) fn communicator(&mut self) -> Option<&mut dyn Communicator> {
        Some(self.endpoint.as_mut()?.comm.as_mut())
    }

    /// Fails if a kernel found an id that names nothing.
    pub(super) fn check_ids(&mut self) -> Result<(), EngineError> {
        let fault = self.fault.as_ptr().cast::<i64>();
        // SAFETY: the memory holds four numbers; what was issued has ended, so no kernel writes it.
        let [code, site, value, limit] =
            unsafe { std::array::from_fn(|i| fault.add(i).read_volatile()) };
        if code == 0 {
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { fault.write_volatile(0) };
        let (program, what) =
            self.sites.get(site as usize).cloned().unwrap_or_else(|| ("step".to_owned(), "id"));
        let why = format!("{what} {value} is not below the vocabulary size {limit}");
        Err(EngineError::Failed { program, why })
    }
}
