//! Writes a file of a checkpoint in turns past the system's cache and through it, and says what each way took: until
//! all was written (what an update may have to wait for), until it was on the disk, and of the processor.
//!
//! `cargo run --release -p phalanx-checkpoint --example write_rate -- FOLDER [MiB] [ROUNDS]`

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use phalanx_checkpoint::{FileWriter, Header};
use phalanx_sys::thread_cpu_time;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let folder = Path::new(args.get(1).ok_or("which folder?")?);
    let number = |at: usize, usual: usize| args.get(at).map_or(Ok(usual), |text| text.parse());
    let (mib, rounds) = (number(2, 200)?, number(3, 3)?);
    // Buffers as units have them: a few MiB, and not aligned to blocks.
    let buffer = vec![0x5a_u8; (5 << 20) + 448];
    let count = (mib << 20) / buffer.len();
    let header = Header { placed: Vec::new(), data: count * buffer.len() };
    let megabytes = header.data as f64 / 1e6;
    for _ in 0..rounds {
        for past in [true, false] {
            let path = folder.join("write_rate.tmp");
            let (start, busy) = (Instant::now(), thread_cpu_time());
            let writer = if past {
                FileWriter::create(folder, "write_rate.tmp", &header)?
            } else {
                let file = std::fs::File::create_new(&path)?;
                let encoded = header.encode();
                file.set_len((encoded.len() + header.data) as u64)?;
                FileWriter::over(&path, "write_rate.tmp", &header, &encoded, Box::new(file))?
            };
            for number in 0..count {
                writer.write((number * buffer.len()) as u64, &buffer)?;
            }
            let written = start.elapsed().as_secs_f64();
            writer.finish()?;
            let all = start.elapsed().as_secs_f64();
            let busy = (thread_cpu_time() - busy).as_secs_f64();
            let way = if past { "past the cache" } else { "through it" };
            println!(
                "{way:>15}: written {written:.3} s, on the disk {all:.3} s ({:.0} MB/s), processor {busy:.3} s",
                megabytes / all
            );
            std::fs::remove_file(&path)?;
        }
    }
    Ok(())
}
