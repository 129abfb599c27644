//! The scripts of a session's ranks.
//!
//! What ranks have in common is worked out once ([`World`]); a rank's plan is then made without any
//! other rank. Ranks that do the same are one class: the plan of one of them is checked, and stands for
//! all.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, OnceLock};

use phalanx_config::DeviceKind;
use phalanx_ir::Model;
use phalanx_script::{
    AheadPart, Category, Class, ClassMember, Inference, MemoryPlan, Moved, Plan, PlannedScript,
    RankPlace, RollPart, Route, Script, ScriptBuilder, ScriptError, ScriptKey, State,
    TrainingScript, World, ahead_script, average_script, check_classes, eval_script, saving_script,
    traffic_of_class, train_script,
};

use super::lowered::Lowered;
use super::rooms::Rooms;
use super::save::Writers;
use super::traced::RankScript;
use phalanx_error::Result;

/// Makes the plans of ranks from what they have in common.
pub struct Planner<'a> {
    /// The programs.
    pub(crate) lowered: &'a Lowered,
    /// By replica.
    train: Vec<World<'a>>,
    /// The same with more room for the rows of experts, by bound and replica.
    roomier: BTreeMap<u8, Vec<World<'a>>>,
    /// The same in which every rank reads all experts, by replica; none if steps do not choose that.
    gathered: Vec<World<'a>>,
    /// The same for the scripts of an endless row, by part and replica; none if there is no row.
    rows: BTreeMap<RollPart, Vec<World<'a>>>,
    /// What the ranks of each replica have in common when a model is run forward, by the key of its
    /// script.
    forward: BTreeMap<ScriptKey, Vec<World<'a>>>,
    /// One plan for each class of ranks, made when first needed.
    classes: OnceLock<Vec<ClassPlan>>,
    /// Who writes what when the session is saved.
    writers: OnceLock<Writers>,
}

/// Ranks that do the same, and the plan of the first of them.
pub struct ClassPlan {
    /// The ranks.
    pub ranks: Vec<usize>,
    /// Where they are.
    places: Vec<RankPlace>,
    /// Their replica.
    replica: usize,
    /// The first one's plan.
    pub plan: Plan,
}

impl<'a> Planner<'a> {
    /// Finds what the ranks of a session have in common.
    pub fn new(lowered: &'a Lowered) -> Result<Self> {
        let (mut train, mut rows) = (Vec::new(), BTreeMap::<RollPart, Vec<World<'a>>>::new());
        let mut forward: BTreeMap<ScriptKey, Vec<World<'a>>> = BTreeMap::new();
        let mut roomier: BTreeMap<u8, Vec<World<'a>>> = BTreeMap::new();
        let mut gathered = Vec::new();
        for replica in 0..lowered.replicas() {
            let (stage_groups, library) = (lowered.stage_groups_of(replica), &lowered.library);
            let world = |model, stage_groups| {
                let parts = lowered.settings.microbatches;
                let world = World::stepping(model, stage_groups, library.clone(), parts);
                let updated = world.map(|world| world.updated(lowered.updates.clone()));
                updated.map(|world| world.parking(lowered.moves.clone()))
            };
            train.push(world(&lowered.model, stage_groups)?.previewing(lowered.goes_ahead()));
            for (bound, model) in (1..).zip(&lowered.roomier) {
                let stage_groups = lowered.roomier_groups_of(replica, usize::from(bound));
                roomier.entry(bound).or_default().push(world(model, stage_groups)?);
            }
            if let Some(model) = &lowered.gathered {
                gathered.push(world(model, lowered.gathered_groups_of(replica))?);
            }
            for row in lowered.rows.iter().filter(|_| lowered.rolls()) {
                let stage_groups = lowered.row_groups_of(replica, row);
                let world = World::rolling(&lowered.model, stage_groups, library.clone(), row)?;
                let world = world.updated(lowered.updates.clone());
                rows.entry(row.window.part).or_default().push(world);
            }
            for (key, model, stage_groups) in lowered.forwards(replica) {
                let world = World::new(model, stage_groups, library.clone())?;
                forward.entry(key).or_default().push(world);
            }
        }
        let (classes, writers) = (OnceLock::new(), OnceLock::new());
        Ok(Self { lowered, train, roomier, gathered, rows, forward, classes, writers })
    }

    /// The scripts that a session can run.
    pub(crate) fn keys(&self) -> Vec<ScriptKey> {
        let (trains, saves) = (self.lowered.trains, self.lowered.settings.saves);
        let train = [
            (ScriptKey::Train, trains),
            (ScriptKey::Ahead(AheadPart::First), self.lowered.goes_ahead()),
            (ScriptKey::Ahead(AheadPart::Middle), self.lowered.goes_ahead()),
            (ScriptKey::Ahead(AheadPart::Last), self.lowered.goes_ahead()),
            (ScriptKey::Gathered, !self.gathered.is_empty()),
            (ScriptKey::SaveAndTrain, trains && saves),
            (ScriptKey::Save, trains && saves),
            (ScriptKey::Average, trains && self.lowered.settings.parallel.replicas.is_some()),
        ];
        let train = train.into_iter().filter(|(_, wanted)| *wanted).map(|(key, _)| key);
        let train = train.chain(self.roomier.keys().copied().map(ScriptKey::Roomier));
        let rows = self.rows.keys().copied().map(ScriptKey::Roll);
        train.chain(rows).chain(self.forward.keys().copied()).collect()
    }

    /// The model that a script runs.
    pub fn model(&self, key: ScriptKey) -> &'a Model {
        self.world(key, 0).model
    }

    fn world(&self, key: ScriptKey, replica: usize) -> &World<'a> {
        match (key, self.forward.get(&key)) {
            (ScriptKey::Roll(part), _) => &self.rows[&part][replica],
            (ScriptKey::Roomier(bound), _) => &self.roomier[&bound][replica],
            (ScriptKey::Gathered, _) => &self.gathered[replica],
            (_, forward) => &forward.unwrap_or(&self.train)[replica],
        }
    }

    /// What a rank keeps from step to step.
    pub fn state(&self, rank: usize) -> Result<State> {
        self.state_at(self.find(rank))
    }

    /// The replica of a rank, and its place there.
    fn find(&self, rank: usize) -> ReplicaPlace {
        ReplicaPlace { replica: self.lowered.replica(rank), at: self.lowered.place(rank) }
    }

    fn state_at(&self, place: ReplicaPlace) -> Result<State> {
        let weights = self.lowered.settings.precision.weights;
        let ReplicaPlace { replica, at } = place;
        Ok(match self.lowered.trains {
            true => self.training(place).state()?,
            false => Inference { world: &self.train[replica], at, weights }.state()?,
        })
    }

    /// A rank's plan, with every script that a session can run. The checks of its class hold for
    /// it.
    pub fn plan(&self, rank: usize) -> Result<Plan> {
        let at = self.find(rank);
        let classes = self.classes.get().map_or(&[][..], Vec::as_slice);
        match classes.iter().find(|class| class.ranks.contains(&rank)) {
            None => self.plan_at(at),
            Some(class) if class.ranks[0] == rank => Ok(class.plan.clone()),
            Some(class) => Ok(class.plan.like(self.state_at(at)?, &self.scripts(at))?),
        }
    }

    /// A rank's script of a training step.
    pub fn train_script(&self, rank: usize) -> Result<Script> {
        let training = self.training(self.find(rank));
        Ok(train_script(&training, &training.state()?)?)
    }

    /// Who writes what when the session is saved.
    pub(crate) fn writers(&self) -> Result<&Writers> {
        if let Some(known) = self.writers.get() {
            return Ok(known);
        }
        let found = Writers::new(self)?;
        Ok(self.writers.get_or_init(|| found))
    }

    /// The builder of a rank's scripts.
    fn scripts(&self, at: ReplicaPlace) -> impl ScriptBuilder + '_ {
        RankScripts { planner: self, at }
    }

    /// One plan for each class of ranks, made when they are first asked for.
    pub fn classes(&self) -> Result<&[ClassPlan]> {
        if let Some(known) = self.classes.get() {
            return Ok(known);
        }
        let mut classes = Vec::new();
        for (replica, world) in self.train.iter().enumerate() {
            for places in world.classes() {
                let rank = |at: &RankPlace| world.stage_groups[at.stage_group].ranks[at.place];
                let ranks = places.iter().map(rank).collect();
                let plan = self.plan_at(ReplicaPlace { replica, at: places[0] })?;
                classes.push(ClassPlan { ranks, places, replica, plan });
            }
        }
        Ok(self.classes.get_or_init(|| classes))
    }

    /// Checks that the scripts of all ranks match, for every key; gives what each rank moves in a
    /// step.
    pub fn check(&self) -> Result<Vec<BTreeMap<Route, Moved>>> {
        let mut moved = BTreeMap::new();
        for key in self.keys() {
            let all = self.scripts_of(key)?;
            let all: Vec<Class<'_>> = all.iter().map(RankScript::class).collect();
            check_classes(&all)?;
            if key == ScriptKey::Train {
                moved = all.iter().flat_map(traffic_of_class).collect();
            }
        }
        Ok(moved.into_values().collect())
    }

    /// How much room there is for rows of experts; none if there is room for the worst choices from the start.
    pub fn rooms(&self) -> Result<Option<Rooms>> {
        Rooms::of(self)
    }

    /// The scripts of single steps, one for each class of ranks.
    pub fn steps(&self) -> Result<BTreeMap<ScriptKey, Vec<RankScript>>> {
        let is_step = |key: &ScriptKey| {
            use ScriptKey::{Gathered, Roomier, SaveAndTrain, Train};
            matches!(key, Train | SaveAndTrain | Roomier(_) | Gathered)
        };
        let keys = self.keys().into_iter().filter(is_step);
        keys.map(|key| Ok((key, self.scripts_of(key)?))).collect()
    }

    /// A script, one for each class of ranks; none if ranks have no such script.
    pub fn scripts_of(&self, key: ScriptKey) -> Result<Vec<RankScript>> {
        if !self.keys().contains(&key) {
            return Ok(Vec::new());
        }
        let own = |class: &ClassPlan| class.ranks_of(key, self.world(key, class.replica));
        Ok(self.classes()?.iter().filter_map(own).collect())
    }

    /// A number that differs between plans: processes compare it, each having planned by itself.
    pub(crate) fn digest(&self) -> Result<u64> {
        let (mut hasher, settings) = (DefaultHasher::new(), &self.lowered.settings);
        let numbers = (settings.precision, settings.optimizer, settings.clip, settings.seed);
        format!("{numbers:?} {:?} {:?}", settings.scaling, settings.units).hash(&mut hasher);
        for class in self.classes()? {
            class.ranks.hash(&mut hasher);
            for (key, planned) in class.plan.scripts() {
                key.hash(&mut hasher);
                let script = &planned.script;
                script.programs.iter().for_each(|entry| entry.placed.hash.hash(&mut hasher));
                script.buffers.iter().for_each(|buffer| buffer.bytes.hash(&mut hasher));
                for action in &script.actions {
                    (&action.label, action.lane).hash(&mut hasher);
                }
            }
        }
        Ok(hasher.finish())
    }

    fn plan_at(&self, at: ReplicaPlace) -> Result<Plan> {
        let mut plan = Plan::new(self.state_at(at)?)?;
        let scripts = self.scripts(at);
        for key in self.keys() {
            plan.script(key, &scripts)?;
        }
        Ok(plan)
    }

    fn training(&self, place: ReplicaPlace) -> TrainingScript<'_> {
        let settings = &self.lowered.settings;
        TrainingScript {
            world: &self.train[place.replica],
            at: place.at,
            precision: settings.precision,
            optimizer: settings.optimizer,
            clip: settings.clip,
            scaling: settings.scaling,
        }
    }
}

impl ClassPlan {
    /// The memory of a step.
    pub fn memory(&self) -> &MemoryPlan {
        let planned = self.script(ScriptKey::Train).or(self.script(ScriptKey::Evaluate));
        &planned.expect("a session has a script").memory
    }

    /// Bytes of the arena that a rank takes: on a GPU, where memory is taken at once, for all bounds of the room for
    /// rows of experts; on the cores for the first bound, because memory that nobody has written takes none.
    pub fn arena(&self, device: DeviceKind) -> usize {
        let larger = |key| matches!(key, ScriptKey::Roomier(_)) && device == DeviceKind::Cpu;
        let own = self.plan.scripts().filter(|(key, _)| !larger(*key));
        own.map(|(_, planned)| planned.memory.arena).fold(self.plan.base().arena, usize::max)
    }

    /// What a rank is planned to write in a step with each bound of the room for rows of experts, and in one that reads all
    /// of them, by category.
    pub(crate) fn peaks(&self) -> Vec<Vec<(Category, usize)>> {
        let larger = (1..).map_while(|bound| self.script(ScriptKey::Roomier(bound)));
        let larger = larger.chain(self.script(ScriptKey::Gathered));
        let larger = larger.map(|planned| planned.memory.peaks.clone());
        [self.memory().peaks.clone()].into_iter().chain(larger).collect()
    }

    fn script(&self, key: ScriptKey) -> Option<&Arc<PlannedScript>> {
        let mut scripts = self.plan.scripts();
        scripts.find(|(other, _)| *other == key).map(|(_, planned)| planned)
    }

    /// The ranks as the checker sees them, in one of their scripts.
    fn ranks_of(&self, key: ScriptKey, world: &World<'_>) -> Option<RankScript> {
        let planned = self.script(key)?.clone();
        let others = self.places.iter().zip(&self.ranks).skip(1).map(|(at, rank)| ClassMember {
            rank: *rank,
            messages: world.messages(&planned.script, *at),
        });
        let others = others.collect();
        Some(RankScript { planned, others })
    }
}

/// A rank: its replica, and its place there.
#[derive(Clone, Copy)]
struct ReplicaPlace {
    replica: usize,
    at: RankPlace,
}

/// The scripts of one rank.
struct RankScripts<'p> {
    planner: &'p Planner<'p>,
    at: ReplicaPlace,
}

impl ScriptBuilder for RankScripts<'_> {
    fn build(&self, key: ScriptKey, state: &State) -> Result<Script, ScriptError> {
        let (planner, at) = (self.planner, self.at);
        match (key, planner.forward.get(&key)) {
            (ScriptKey::Train, _) => train_script(&planner.training(at), state),
            (ScriptKey::Roll(_) | ScriptKey::Roomier(_) | ScriptKey::Gathered, _) => {
                let world = planner.world(key, at.replica);
                train_script(&TrainingScript { world, ..planner.training(at) }, state)
            }
            (ScriptKey::Ahead(part), _) => ahead_script(&planner.training(at), state, part),
            (ScriptKey::SaveAndTrain, _) => saving_script(&planner.training(at), state),
            (ScriptKey::Save, _) => Ok(state.save_script()),
            (ScriptKey::Average, _) => {
                let lowered = planner.lowered;
                let states = lowered.settings.parallel.replicas.is_some_and(|own| own.states);
                let ranks = lowered.replica_ranks(at.at.stage_group);
                average_script(&planner.training(at), state, &ranks, states)
            }
            (_, Some(worlds)) => {
                let weights = planner.lowered.settings.precision.weights;
                let world = &worlds[at.replica];
                eval_script(&Inference { world, at: at.at, weights }, state)
            }
            (key, _) => Err(ScriptError::Schedule(format!("a session has no script {key:?}"))),
        }
    }
}
