//! Who a process is, by the variables that different programs set.

use phalanx_comm::{BadEnvironment, Environment, MeetingPoint, Token};

fn find(text: &str) -> Result<Option<Environment>, BadEnvironment> {
    let get = |name: &str| {
        let mut pairs = text.split_whitespace().filter_map(|pair| pair.split_once('='));
        pairs.find(|(own, _)| *own == name).map(|(_, value)| value.to_owned())
    };
    Environment::find(&get)
}

const HAND: &str = "RANK=1 WORLD_SIZE=4 MASTER_ADDR=n1 MASTER_PORT=29500";

#[test]
fn each_program_says_who_a_process_is() {
    let slurm = "SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_STEP_ID=2 SLURM_STEP_NODELIST=gpu[03-05,9] \
                 SLURM_JOB_ID=77 SLURM_LOCALID=0";
    let torchrun = format!("{HAND} LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none");
    for (text, rank, ranks, local, meet) in [
        (HAND, 1, 4, None, "n1:29500"),
        (&torchrun, 1, 4, Some((1, 2)), "n1:29501 to 29564"),
        // torchrun inside a step of srun: its own numbers hold.
        (&format!("{torchrun} {slurm}"), 1, 4, Some((1, 2)), "n1:29501 to 29564"),
        (slurm, 3, 8, None, "gpu03:20541 to 20604"),
        (
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 \
             OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=a MASTER_PORT=1234",
            0,
            2,
            Some((0, 2)),
            "a:1234",
        ),
        ("PMI_RANK=5 PMI_SIZE=6 MASTER_ADDR=a MASTER_PORT=1234", 5, 6, None, "a:1234"),
    ] {
        let found = find(text).unwrap().unwrap_or_else(|| panic!("{text}: alone"));
        assert_eq!((found.rank, found.ranks, found.local), (rank, ranks, local), "{text}");
        assert_eq!((found.meet.to_string().as_str(), found.launched), (meet, false), "{text}");
    }
}

#[test]
fn a_launched_process_has_its_socket_and_token() {
    let token = Token::random().unwrap();
    let text = format!("RANK=1 WORLD_SIZE=2 PHALANX_MEET=/tmp/x PHALANX_TOKEN={}", token.hex());
    let found = find(&text).unwrap().unwrap();
    assert_eq!((found.meet, found.token), (MeetingPoint::Path("/tmp/x".into()), token));
    assert!(found.launched);
}

#[test]
fn other_processes_are_alone() {
    for text in [
        "",
        "RANK=0 WORLD_SIZE=1",
        "RANK= WORLD_SIZE=",
        // A batch script, without srun.
        "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_JOB_ID=77 SLURM_NODELIST=gpu[1-2]",
    ] {
        assert_eq!(find(text), Ok(None), "{text}");
    }
}

#[test]
fn contradictions_are_refused_with_both_values() {
    for (text, problem) in [
        ("RANK=1", "RANK = 1 is set, but WORLD_SIZE is not"),
        ("WORLD_SIZE=4", "WORLD_SIZE = 4 is set, but RANK is not"),
        ("RANK=4 WORLD_SIZE=4", "RANK = 4 is not a rank of WORLD_SIZE = 4"),
        ("RANK=-1 WORLD_SIZE=4", "RANK = \"-1\" is not a whole number"),
        ("RANK=1 WORLD_SIZE=4", "RANK = 1 and WORLD_SIZE = 4 are set, but MASTER_ADDR is not"),
        ("RANK=1 WORLD_SIZE=4 MASTER_ADDR=a", "are set, but MASTER_PORT is not"),
        (
            "RANK=1 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=99999",
            "MASTER_PORT = 99999 is not a port",
        ),
        ("RANK=1 WORLD_SIZE=2 PHALANX_MEET=/tmp/x", "PHALANX_TOKEN is not a token"),
        (
            "RANK=1 WORLD_SIZE=4 PMI_RANK=2 PMI_SIZE=4",
            "the environment has RANK = 1 and WORLD_SIZE = 4, but also PMI_RANK = 2 and PMI_SIZE = 4",
        ),
        (
            "RANK=0 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2",
            "LOCAL_RANK = 1 and LOCAL_WORLD_SIZE = 2 cannot be where RANK = 0 of 4",
        ),
        (
            "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=a[",
            "SLURM_STEP_NODELIST = \"a[\" is not a list of hosts",
        ),
    ] {
        let error = find(text).unwrap_err();
        assert!(error.problem.contains(problem), "{text}: {}", error.problem);
        assert!(!error.fix.is_empty(), "{text}");
    }
}
