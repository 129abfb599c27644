//! Tables of schedules that say more than an order: who holds a stage, and when it is updated.

use phalanx_pipeline::{NamedSchedule, ScheduleShape, csv};
use phalanx_session::{Lowered, Parallel, Pipeline};

use crate::asynchronous::batches;
use crate::holders::{LR, bits, loaded, of, step};
use crate::support::{agrees, llama, models, on, settings};

/// A table says who holds what and when it is updated; it has the bits of the schedule that it was written of. So may pipelines that
/// go both ways be late, and their directions sum.
#[test]
fn tables_of_holders_and_directions_run() {
    let dir = tempfile::tempdir().unwrap();
    let written = |name: &str, table: &str| {
        let file = dir.path().join(name);
        std::fs::write(&file, table).unwrap();
        format!("parallel.schedule=csv:{}", file.display())
    };
    for (case, sync) in [(("2-1-1", 4), false), (("1-2", 4), true), (("2-2", 4), false)] {
        let vertical = format!("parallel.vertical_sync={sync}");
        let own = loaded(case, &[&vertical]);
        let counts: Vec<usize> = case.0.split('-').map(|count| count.parse().unwrap()).collect();
        let shape = ScheduleShape::held_by(&counts, case.1).vertical_sync(sync);
        let table = csv::write(&NamedSchedule::PipeDream.build(shape).unwrap());
        let table = written(&format!("{}.csv", case.0), &table);
        let groups = format!("parallel.pp={}", counts.iter().sum::<usize>());
        let sizes = format!("train.microbatches={}", case.1);
        let sets = ["model.layers=3", "optim.clip=none", &table, &groups, &sizes];
        let (mut named, mut read) = (of(&own), of(&llama(&sets)));
        for batch in batches(&own, 3) {
            assert_eq!(step(&mut read, &batch, LR), step(&mut named, &batch, LR), "{case:?}");
        }
        assert_eq!(bits(&mut read), bits(&mut named), "{case:?}");
        if case.0 == "2-1-1" {
            agrees(
                "a table of holders",
                &llama(&[&sets[..], &["parallel.dp=2", "parallel.zero=3"]].concat()),
                None,
            );
        }
    }
    // Both directions of Chimera are one step late.
    for (m, zero) in [(2, "parallel.zero=0"), (4, "parallel.zero=2")] {
        let both = NamedSchedule::Chimera.build(ScheduleShape::new(2, m)).unwrap();
        let late = |line: &str| match line.starts_with("device") {
            true => format!("{line},round\n"),
            false => format!("{}-1,{m}\n", line.strip_suffix('0').unwrap()),
        };
        let table: String = csv::write(&both).lines().map(late).collect();
        let table = written(&format!("late{m}.csv"), &table);
        let sizes = format!("train.microbatches={m}");
        let sets = [
            "model.layers=3",
            "optim.clip=none",
            &table,
            "parallel.pp=2",
            &sizes,
            "parallel.dp=2",
            zero,
        ];
        agrees(&format!("chimera, late, {m}"), &llama(&sets), None);
    }
}

/// A schedule of one's own says itself who holds what: other holders are refused, and its own are no news.
#[test]
fn a_schedule_of_ones_own_takes_no_other_holders() {
    let loaded = llama(&["model.layers=3", "train.microbatches=4"]);
    let with = |holders: &[usize]| {
        let order = NamedSchedule::OneFOneB.build(ScheduleShape::new(2, 4)).unwrap().into();
        let pipeline = Pipeline { order, holders: holders.to_vec(), ..Pipeline::default() };
        let parallel = Parallel { pipeline, ..on("pp=2", []) };
        Lowered::new(&models(&loaded), settings(&loaded, Some(parallel)))
    };
    let refused = with(&[2, 1]).err().unwrap().to_string();
    assert!(refused.contains("held 1-1 times, but 2-1 holders are asked for"), "{refused}");
    assert!(with(&[1, 1]).is_ok() && with(&[]).is_ok());
}
