//! Which rank a process is, and where ranks meet: from the variables of whatever started it.
//!
//! This is pure: it reads variables through a function, so that tests give it tables.

use std::fmt;
use std::path::PathBuf;

use super::hello::Token;
use super::nodelist::first_host;

/// The variables that `phalanx launch` gives its processes, besides RANK, WORLD_SIZE and LOCAL_RANK.
pub mod names {
    /// The socket at which ranks of one host meet.
    pub const MEET: &str = "PHALANX_MEET";
    /// The job's token.
    pub const TOKEN: &str = "PHALANX_TOKEN";
    /// The file descriptor of the job's flight recorder.
    pub const RECORDER: &str = "PHALANX_RECORDER";
    /// The file descriptor of the memory in which ranks before these kept their state.
    pub const MEMORY: &str = "PHALANX_MEMORY";
    /// How many ports, from MASTER_PORT on, rank 0 may listen at: set by `phalanx agent`.
    pub const PORTS: &str = "PHALANX_PORTS";
    /// How many times the ranks of the job were started before.
    pub const EPOCH: &str = "PHALANX_EPOCH";
    /// Where agents keep copies of the state: an address and the ranks there, for each host.
    pub const STORES: &str = "PHALANX_STORES";
}

/// Who a process is in its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// Its rank.
    pub rank: usize,
    /// How many ranks there are.
    pub ranks: usize,
    /// Its number among the processes of its host, and how many there are, where that is known.
    pub local: Option<(usize, usize)>,
    /// Where ranks meet.
    pub meet: MeetingPoint,
    /// What proves that a process belongs to the job.
    pub token: Token,
    /// Whether `phalanx launch`, `phalanx agent` or `mpirun` started it: then that program tells people
    /// about lost processes.
    pub launched: bool,
    /// How many times the ranks of the job were started before; processes of different epochs never
    /// meet.
    pub epoch: u64,
}

/// Where the ranks of a job meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MeetingPoint {
    /// A Unix socket: all ranks are on one host.
    Path(PathBuf),
    /// The first of these ports of a host that rank 0 can open.
    Host {
        /// The host of rank 0.
        host: String,
        /// The ports to try, in this order.
        ports: Vec<u16>,
    },
    /// Nowhere: an MPI library knows where ranks are.
    Mpi,
}

impl fmt::Display for MeetingPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MeetingPoint::Path(path) => write!(f, "{}", path.display()),
            MeetingPoint::Mpi => f.write_str("the MPI job"),
            MeetingPoint::Host { host, ports } => match (ports.first(), ports.last()) {
                (Some(first), Some(last)) if first != last => write!(f, "{host}:{first} to {last}"),
                (Some(port), _) => write!(f, "{host}:{port}"),
                (None, _) => f.write_str(host),
            },
        }
    }
}

/// Variables that cannot be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadEnvironment {
    /// What is wrong, with the values.
    pub problem: String,
    /// What to do.
    pub fix: String,
}

/// Ports that are tried where the named one is in use: torchrun's store has taken it.
pub(super) const TRIES: u16 = 64;

impl Environment {
    /// Reads the variables; `None` if none of them says that this process is one of several.
    pub fn find(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, BadEnvironment> {
        let variables = Variables(get);
        let place = Place::find(&variables)?;
        let Some(place) = place.filter(|place| place.ranks > 1) else { return Ok(None) };
        let (meet, token) = match get(names::MEET) {
            Some(path) => {
                let token = get(names::TOKEN).as_deref().and_then(Token::from_hex);
                let Some(token) = token else {
                    return Err(bad(
                        format!("{} is set, but {} is not a token", names::MEET, names::TOKEN),
                        "start ranks with phalanx launch, or leave both out",
                    ));
                };
                (MeetingPoint::Path(path.into()), token)
            }
            None => meeting(&variables, &place)?,
        };
        let (rank, ranks) = (place.rank, place.ranks);
        let launched = matches!(meet, MeetingPoint::Path(_)) || get(names::PORTS).is_some();
        let epoch = variables.number(names::EPOCH)?.unwrap_or(0) as u64;
        Ok(Some(Self { rank, ranks, local: place.local, meet, token, launched, epoch }))
    }
}

impl Environment {
    /// The rank and the number of ranks that the variables of any program give this process, with
    /// their names; no meeting point is needed.
    pub fn place(
        get: &dyn Fn(&str) -> Option<String>,
    ) -> Option<([&'static str; 2], usize, usize)> {
        let place = Place::find(&Variables(get)).ok().flatten()?;
        Some((place.names, place.rank, place.ranks))
    }
}

pub(super) struct Variables<'a>(pub(super) &'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    pub(super) fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<usize>, BadEnvironment> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.trim().parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(bad(
                format!("{name} = {text:?} is not a whole number"),
                "set it to one, or unset it",
            )),
        }
    }
}

/// A rank in a world, as one program says it.
struct Place {
    rank: usize,
    ranks: usize,
    local: Option<(usize, usize)>,
    /// The variables that said it.
    names: [&'static str; 2],
}

/// The variables of each program that starts ranks: rank, world, place on the host, ranks there.
const STARTERS: [[&str; 4]; 4] = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
    [
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ],
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"],
];

impl Place {
    /// What the variables say, if any do; contradictions are refused.
    fn find(variables: &Variables<'_>) -> Result<Option<Self>, BadEnvironment> {
        let mut found: Vec<Self> = Vec::new();
        for names in STARTERS {
            // A batch script has Slurm's variables too; only a step of srun is a rank.
            let step = ["SLURM_STEP_ID", "SLURM_STEP_NODELIST"];
            let slurm = names[0] == "SLURM_PROCID";
            if slurm && step.iter().any(|name| variables.text(name).is_none()) {
                continue;
            }
            found.extend(Self::read(variables, names)?);
        }
        // A step of srun may start torchrun, phalanx launch or phalanx agent, which then number their
        // own ranks.
        let nested = ["TORCHELASTIC_RUN_ID", names::MEET, names::PORTS];
        if nested.iter().any(|name| variables.text(name).is_some()) {
            found.truncate(1);
        }
        let mut found = found.into_iter();
        let Some(first) = found.next() else { return Ok(None) };
        for other in found {
            if (other.rank, other.ranks) != (first.rank, first.ranks) {
                let told = |place: &Self| {
                    let [rank, ranks] = place.names;
                    format!("{rank} = {} and {ranks} = {}", place.rank, place.ranks)
                };
                return Err(bad(
                    format!("the environment has {}, but also {}", told(&first), told(&other)),
                    "unset one of the two pairs",
                ));
            }
        }
        Ok(Some(first))
    }

    fn read(
        variables: &Variables<'_>,
        [rank, ranks, local, locals]: [&'static str; 4],
    ) -> Result<Option<Self>, BadEnvironment> {
        let (own, of) = match (variables.number(rank)?, variables.number(ranks)?) {
            (None, None) => return Ok(None),
            (Some(own), Some(of)) => (own, of),
            (own, _) => {
                let (there, missing) = if own.is_some() { (rank, ranks) } else { (ranks, rank) };
                let value = variables.text(there).unwrap_or_default();
                return Err(bad(
                    format!("{there} = {value} is set, but {missing} is not"),
                    "set both for every process, or neither",
                ));
            }
        };
        if own >= of {
            return Err(bad(
                format!("{rank} = {own} is not a rank of {ranks} = {of}"),
                format!("ranks are 0 to {ranks} - 1; set both for every process, or neither"),
            ));
        }
        let place = (variables.number(local)?, variables.number(locals)?);
        let local = match place {
            (Some(at), Some(count)) if at >= count || count > of || at > own => {
                return Err(bad(
                    format!(
                        "{local} = {at} and {locals} = {count} cannot be where {rank} = {own} of {of}"
                    ),
                    format!("unset {local} and {locals}: they only choose cores"),
                ));
            }
            (Some(at), Some(count)) => Some((at, count)),
            _ => None,
        };
        Ok(Some(Self { rank: own, ranks: of, local, names: [rank, ranks] }))
    }
}

/// Where ranks meet that nobody gave a socket, and their token.
fn meeting(
    variables: &Variables<'_>,
    place: &Place,
) -> Result<(MeetingPoint, Token), BadEnvironment> {
    let token = |text: String| Token::from_hex(&text).unwrap_or_else(|| Token::of(&text));
    let own_token = variables.text(names::TOKEN).map(token);
    let run = variables.text("TORCHELASTIC_RUN_ID");
    let (host, port) = (variables.text("MASTER_ADDR"), variables.number("MASTER_PORT")?);
    let (host, ports, job) = match (host, port) {
        (Some(host), Some(port)) => {
            let fits = |port: &usize| *port > 0 && *port <= usize::from(u16::MAX - TRIES);
            let Some(port) = Some(port).filter(fits) else {
                return Err(bad(
                    format!("MASTER_PORT = {port} is not a port"),
                    format!("set it to a number from 1024 to {}", u16::MAX - TRIES),
                ));
            };
            let port = port as u16;
            match run {
                Some(run) => (host, (port + 1..=port + TRIES).collect(), format!("torchrun {run}")),
                None => {
                    let job = format!("{host}:{port}");
                    let tries = variables.number(names::PORTS)?.unwrap_or(1);
                    let tries = tries.clamp(1, usize::from(TRIES)) as u16;
                    (host, (port..port + tries).collect(), job)
                }
            }
        }
        (None, None) if place.names[0] == "SLURM_PROCID" => slurm(variables)?,
        (host, _) => {
            let missing = if host.is_some() { "MASTER_PORT" } else { "MASTER_ADDR" };
            let [rank, ranks] = place.names;
            let (own, of) = (place.rank, place.ranks);
            return Err(bad(
                format!("{rank} = {own} and {ranks} = {of} are set, but {missing} is not"),
                match rank.starts_with("OMPI") || rank.starts_with("PMI") {
                    true => {
                        "set run.ranks to \"mpi\", so that ranks meet and communicate over MPI; or let \
                         mpirun pass MASTER_ADDR, the host of rank 0, and MASTER_PORT, a free port there"
                    }
                    false => {
                        "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, the \
                         same for all; or start ranks with phalanx launch"
                    }
                },
            ));
        }
    };
    let token = own_token.unwrap_or_else(|| Token::of(&job));
    Ok((MeetingPoint::Host { host, ports }, token))
}

/// The first host of a step of srun, and ports that follow from the job.
pub(super) fn slurm(
    variables: &Variables<'_>,
) -> Result<(String, Vec<u16>, String), BadEnvironment> {
    let list = variables.text("SLURM_STEP_NODELIST").unwrap_or_default();
    let Some(host) = first_host(&list) else {
        return Err(bad(
            format!("SLURM_STEP_NODELIST = {list:?} is not a list of hosts"),
            "set MASTER_ADDR and MASTER_PORT",
        ));
    };
    let id = variables.number("SLURM_JOB_ID")?.unwrap_or(0);
    let step = variables.number("SLURM_STEP_ID")?.unwrap_or(0);
    let first = 20_000 + ((id * 7 + step) % 10_000) as u16;
    Ok((host, (first..first + TRIES).collect(), format!("slurm {id}.{step}")))
}

pub(super) fn bad(problem: impl Into<String>, fix: impl Into<String>) -> BadEnvironment {
    BadEnvironment { problem: problem.into(), fix: fix.into() }
}
