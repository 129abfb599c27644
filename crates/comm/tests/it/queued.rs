//! A device that needs no hardware: each rank has a queue, which a thread of its own works off. So what a rank
//! has issued is done later, and what ranks do not order by marks happens in any order.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, LazyLock, Mutex};
use std::thread::JoinHandle;

use half::bf16;
use phalanx_call::MemoryKind;
use phalanx_comm::{
    CallNote, Combining, DeviceMover, Options, Reached, ReduceOp, StridedRows, Threads, Waiting,
};
use phalanx_ir::DType;

use super::attached::Attached;
use super::conformance::Launched;
use super::suite::{self, OverDevice, TestDevice};

type Work = Box<dyn FnOnce() + Send>;

/// A queue and the thread that works it off.
struct Queue {
    work: Option<Sender<Work>>,
    thread: Option<JoinHandle<()>>,
}

impl Queue {
    fn new() -> Self {
        let (work, next) = channel::<Work>();
        let thread = std::thread::spawn(move || next.into_iter().for_each(|work| work()));
        Self { work: Some(work), thread: Some(thread) }
    }

    fn push(&self, work: impl FnOnce() + Send + 'static) {
        self.work.as_ref().unwrap().send(Box::new(work)).unwrap();
    }

    fn wait(&self) {
        let (tell, done) = channel();
        self.push(move || tell.send(()).unwrap());
        done.recv().unwrap();
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        drop(self.work.take());
        self.thread.take().map(JoinHandle::join);
    }
}

/// A place in a queue: how often it was put there, and how often it was reached.
#[derive(Default)]
struct Mark {
    placed: AtomicU64,
    reached: Mutex<u64>,
    changed: Condvar,
}

/// The marks of all queues, by number. They stay, as other ranks may still wait for them.
static MARKS: LazyLock<Mutex<HashMap<u64, Arc<Mark>>>> = LazyLock::new(Mutex::default);
static NEXT: AtomicU64 = AtomicU64::new(1);

fn new_mark() -> u64 {
    let number = NEXT.fetch_add(1, Ordering::SeqCst);
    MARKS.lock().unwrap().insert(number, Arc::default());
    number
}

fn mark(number: u64) -> Arc<Mark> {
    MARKS.lock().unwrap()[&number].clone()
}

/// Moves memory on a queue.
struct QueuedMover {
    queue: Arc<Queue>,
    slots: HashMap<u64, [u64; 2]>,
    spare: Box<[u64; 8]>,
}

impl QueuedMover {
    fn place(&self, number: u64) {
        let mark = mark(number);
        let count = mark.placed.fetch_add(1, Ordering::SeqCst) + 1;
        self.queue.push(move || {
            *mark.reached.lock().unwrap() = count;
            mark.changed.notify_all();
        });
    }
}

/// An address that work on a queue uses.
struct Shared<T>(T);
// SAFETY: the ranks order what they do with the memory by marks, which is what is tested.
unsafe impl<T> Send for Shared<T> {}

impl DeviceMover for QueuedMover {
    fn memory(&self) -> MemoryKind {
        MemoryKind::named("queued")
    }

    fn announce(
        &mut self,
        slot: u64,
        send: *const u8,
        receive: *mut u8,
    ) -> Result<CallNote, String> {
        let [begin, end] = *self.slots.entry(slot).or_insert_with(|| [new_mark(), new_mark()]);
        self.place(begin);
        let mut note = [0; 32];
        note[..4].copy_from_slice(&[send as u64, receive as u64, begin, end]);
        Ok(note)
    }

    fn reach(&mut self, note: &CallNote) -> Result<Reached, String> {
        let pointer = |word: u64| std::ptr::with_exposed_provenance_mut(word as usize);
        let (send, receive) = (pointer(note[0]), pointer(note[1]));
        Ok(Reached { send, receive, begin: note[2], end: note[3] })
    }

    fn after(&mut self, number: u64) -> Result<(), String> {
        let mark = mark(number);
        let count = mark.placed.load(Ordering::SeqCst);
        if count == 0 {
            return Err("the mark is in no queue yet".to_owned());
        }
        self.queue.push(move || {
            let reached = mark.reached.lock().unwrap();
            drop(mark.changed.wait_while(reached, |reached| *reached < count).unwrap());
        });
        Ok(())
    }

    fn finished(&mut self, slot: u64) -> Result<(), String> {
        self.place(self.slots[&slot][1]);
        Ok(())
    }

    unsafe fn copy(
        &mut self,
        shape: [usize; 3],
        from: StridedRows,
        to: StridedRows,
    ) -> Result<(), String> {
        let places = Shared((from, to));
        self.queue.push(move || {
            let Shared((from, to)) = { places };
            for (group, row) in rows(shape) {
                // SAFETY: the caller's, in the order of marks.
                unsafe {
                    at(from, group, row).copy_to_nonoverlapping(at(to, group, row), shape[2])
                };
            }
        });
        Ok(())
    }

    unsafe fn reduce(
        &mut self,
        how: Combining,
        shape: [usize; 3],
        sources: &[StridedRows],
        targets: &[StridedRows],
    ) -> Result<(), String> {
        let places = Shared((sources.to_vec(), targets.to_vec()));
        self.queue.push(move || {
            let Shared((sources, targets)) = { places };
            for (group, row) in rows(shape) {
                for i in 0..shape[2] {
                    // SAFETY: the caller's, in the order of marks.
                    unsafe { element(how, &sources, &targets, group, row, i) };
                }
            }
        });
        Ok(())
    }

    fn spare(&mut self) -> Result<*mut u8, String> {
        Ok(self.spare.as_mut_ptr().cast())
    }
}

impl Drop for QueuedMover {
    fn drop(&mut self) {
        self.queue.wait();
    }
}

fn rows([outer, rows, _]: [usize; 3]) -> impl Iterator<Item = (usize, usize)> {
    (0..outer).flat_map(move |group| (0..rows).map(move |row| (group, row)))
}

fn at(place: StridedRows, group: usize, row: usize) -> *mut u8 {
    place.base.wrapping_add(group * place.outer + row * place.row)
}

/// Combines one element, written without regard to speed.
///
/// # Safety
/// As for `DeviceMover::reduce`.
unsafe fn element(
    how: Combining,
    sources: &[StridedRows],
    targets: &[StridedRows],
    group: usize,
    row: usize,
    i: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        match how.dtype {
            DType::F64 => {
                of::<f64, f64>(how, sources, targets, (group, row, i), |x| x, |x| x, |a, b| a + b)
            }
            DType::F32 => {
                of::<f32, f32>(how, sources, targets, (group, row, i), |x| x, |x| x, |a, b| a + b)
            }
            DType::I32 => {
                of::<i32, i32>(
                    how,
                    sources,
                    targets,
                    (group, row, i),
                    |x| x,
                    |x| x,
                    i32::wrapping_add,
                );
            }
            _ => of::<bf16, f32>(
                how,
                sources,
                targets,
                (group, row, i),
                bf16::to_f32,
                bf16::from_f32,
                |a, b| a + b,
            ),
        }
    }
}

/// # Safety
/// As for `DeviceMover::reduce`.
unsafe fn of<T: Copy, A: Copy + PartialOrd>(
    how: Combining,
    sources: &[StridedRows],
    targets: &[StridedRows],
    (group, row, i): (usize, usize, usize),
    load: impl Fn(T) -> A,
    store: impl Fn(A) -> T,
    add: impl Fn(A, A) -> A,
) {
    let place = |place: &StridedRows| at(*place, group, row).cast::<T>().wrapping_add(i);
    let join = |a: A, b: A| match how.op {
        ReduceOp::Sum => add(a, b),
        ReduceOp::Max => {
            if a > b {
                a
            } else {
                b
            }
        }
    };
    // SAFETY: the caller's.
    unsafe {
        let mut sum = load(place(&sources[0]).read());
        for source in &sources[1..] {
            sum = join(sum, load(place(source).read()));
        }
        if how.accumulate {
            sum = join(load(place(&targets[0]).read()), sum);
        }
        targets.iter().for_each(|target| place(target).write(store(sum)));
    }
}

struct QueuedDevice {
    queue: Arc<Queue>,
}

impl TestDevice for QueuedDevice {
    fn mover(&self, _rank: usize) -> Box<dyn DeviceMover> {
        let queue = self.queue.clone();
        Box::new(QueuedMover { queue, slots: HashMap::new(), spare: Box::new([0; 8]) })
    }

    fn allocate(&mut self, bytes: usize) -> *mut u8 {
        let words: Box<[u128]> = vec![0; bytes.div_ceil(16)].into();
        Box::into_raw(words).cast()
    }

    fn free(&mut self, memory: *mut u8, bytes: usize) {
        self.queue.wait();
        let words = std::ptr::slice_from_raw_parts_mut(memory.cast::<u128>(), bytes.div_ceil(16));
        // SAFETY: it was made above with as many words, and nothing on the queue uses it any more.
        drop(unsafe { Box::from_raw(words) });
    }

    unsafe fn write(&mut self, to: *mut u8, bytes: &[u8]) {
        let (to, bytes) = (Shared(to), bytes.to_vec());
        self.queue.push(move || {
            let Shared(to) = { to };
            // SAFETY: the caller's.
            unsafe { to.copy_from(bytes.as_ptr(), bytes.len()) };
        });
    }

    unsafe fn read(&mut self, from: *const u8, bytes: &mut [u8]) {
        self.queue.wait();
        // SAFETY: the caller's; the queue is empty.
        unsafe { bytes.as_mut_ptr().copy_from(from, bytes.len()) };
    }
}

#[test]
fn queues_conform() {
    let device = || QueuedDevice { queue: Arc::new(Queue::new()) };
    for waiting in [Waiting::Spin, Waiting::Park] {
        let threads = move |ranks, options| OverDevice {
            launcher: Threads { ranks, options: Options { waiting, ..options } },
            device,
        };
        suite::run(&mut Launched(threads)).unwrap();
    }
    // The same through memory that ranks see at different addresses, as processes do.
    let attached = |ranks, options| OverDevice { launcher: Attached { ranks, options }, device };
    suite::run(&mut Launched(attached)).unwrap();
}
