//! Sources are laid over one another, and what comes out can be written and read again.

use phalanx_config::{Config, Count, FloatKind, ModelKind, Setting, Sources, preset};

fn load(sources: Sources) -> Config {
    Config::load(&sources).unwrap_or_else(|e| panic!("{e}")).config
}

fn refused(sources: Sources) -> String {
    Config::load(&sources).unwrap_err().to_string()
}

fn file(dir: &tempfile::TempDir, text: &str) -> std::path::PathBuf {
    let path = dir.path().join("config.toml");
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn every_preset_loads_and_survives_writing_and_reading() {
    let dir = tempfile::tempdir().unwrap();
    for name in preset::names() {
        let config = load(Sources::default().preset(name));
        let text = config.to_toml();
        let again = load(Sources::default().file(file(&dir, &text)));
        assert_eq!(again, config, "{name}");
        assert_eq!(again.to_toml(), text);
    }
}

#[test]
fn unusual_values_survive_writing_and_reading() {
    let dir = tempfile::tempdir().unwrap();
    let sets = [
        "model.from=hf:/models/a \"b\"",
        "model.kind=gpt2",
        "data.kind=tokens",
        "data.path=ids.bin",
        "data.dtype=u32",
        "data.ignore_token=4294967295",
        "data.seed=7",
        "optim.kind=sgd",
        "optim.momentum=0.9",
        "optim.nesterov=true",
        "optim.clip=none",
        "optim.lr=0.30000000000000004",
        "precision.compute=f64",
        "run.memory_limit=1.5 GiB",
        "run.name=2024",
        "run.threads=3",
        "parallel.order=tp-cp-pp-dp",
        "train.recompute=selective",
        "optim.schedule=linear",
    ];
    let config = load(
        sets.iter().fold(Sources::default().preset("default").set("model.kv_heads=4"), |s, set| {
            s.set(*set)
        }),
    );
    assert_eq!(config.precision.weights, FloatKind::F64);
    assert_eq!(config.precision.grads, FloatKind::F64);
    assert_eq!(config.run.name.as_ref().map(|name| name.as_str()), Some("2024"));
    let again = load(Sources::default().file(file(&dir, &config.to_toml())));
    assert_eq!(again, config);
}

#[test]
fn later_sources_win_and_are_remembered() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, "[train]\nsteps = 7\nbatch_size = 16\n");
    let sources = Sources::default()
        .preset("tiny")
        .file(&path)
        .set("train.batch_size=8")
        .set("train.batch_size = 4");
    let loaded = Config::load(&sources).unwrap();
    let train = &loaded.config.train;
    assert_eq!((train.steps.get(), train.batch_size.get(), train.seq_len.get()), (7, 4, 64));
    let place = |key| loaded.place(key).map(ToString::to_string);
    assert_eq!(place("train.steps"), Some(format!("{}:2", path.display())));
    assert_eq!(place("train.batch_size").as_deref(), Some("--set"));
    assert_eq!(place("train.seq_len").as_deref(), Some("preset tiny:16"));
    assert_eq!(place("train.log_every"), None);
    assert_eq!(loaded.label, "config");
}

#[test]
fn every_way_to_write_a_section_is_read() {
    let dir = tempfile::tempdir().unwrap();
    for text in ["[train]\nsteps = 9\n", "train.steps = 9\n", "train = { steps = 9 }\n"] {
        assert_eq!(load(Sources::default().file(file(&dir, text))).train.steps.get(), 9, "{text}");
    }
}

#[test]
fn without_sources_the_default_preset_is_used() {
    let bare = Config::load(&Sources::default()).unwrap();
    assert_eq!(bare.config, load(Sources::default().preset("default")));
    assert_eq!(bare.label, "default");
    assert_eq!(load(Sources::default().set("train.steps=3")).train.steps.get(), 3);
}

#[test]
fn a_file_that_changes_little_changes_the_default_run() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, "[train]\nsteps = 3\n\n[model]\n");
    let loaded = Config::load(&Sources::default().file(&path)).unwrap();
    let alone = Sources::default().set("train.steps=3").set("parallel.dp=1");
    assert_eq!(loaded.config, load(alone));
    assert_eq!((loaded.label.as_str(), loaded.preset.as_deref()), ("config", Some("default")));
}

#[test]
fn a_file_with_a_model_of_its_own_stands_on_the_tables_defaults() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, "[model]\nlayers = 2\nheads = 8\n");
    let loaded = Config::load(&Sources::default().file(&path)).unwrap();
    let model = &loaded.config.model;
    // The default preset has two key and value heads, 140 steps and another learning rate.
    assert_eq!((model.layers.get(), model.heads.get(), model.kv_heads.get()), (2, 8, 8));
    assert_eq!((loaded.config.train.steps.get(), loaded.preset), (200, None));
}

#[test]
fn a_file_names_its_preset_and_the_command_line_another() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, "preset = \"tiny\"\n[model]\nlayers = 2\n");
    let config = load(Sources::default().file(&path));
    assert_eq!((config.model.layers.get(), config.model.width.get()), (2, 64));
    let config = load(Sources::default().file(&path).preset("bench-13m"));
    assert_eq!((config.model.layers.get(), config.model.width.get()), (2, 384));
    let path = file(&dir, "# one\npreset = \"tinny\"\n");
    let text = refused(Sources::default().file(&path));
    assert!(text.contains("config.toml:2)") && text.contains("did you mean `tiny`?"), "{text}");
    let text = refused(Sources::default().file(file(&dir, "preset = 3\n")));
    assert!(text.contains("preset = 3") && text.contains("bench-13m"), "{text}");
    let text = refused(Sources::default().set("preset=tiny"));
    assert!(text.contains("usual fix: --preset tiny"), "{text}");
}

#[test]
fn an_unset_sequence_length_fits_the_context() {
    let length = |sources: Sources| load(sources).train.seq_len.get();
    let short = Sources::default().set("model.context=48");
    assert_eq!(length(short.clone()), 48);
    assert_eq!(length(Sources::default().set("model.context=4096")), 128);
    let text = refused(short.set("train.seq_len=64"));
    assert!(text.contains("train.seq_len = 64 is longer than model.context = 48"), "{text}");
}

#[test]
fn a_file_that_is_no_text_is_told_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, "");
    std::fs::write(&path, b"[train]\nsteps = 3 # \xfcber\n").unwrap();
    let text = refused(Sources::default().file(&path));
    assert!(text.contains("config.toml:2") && text.contains("byte 0xfc"), "{text}");
    assert!(text.contains("usual fix: save the file as UTF-8"), "{text}");
}

#[test]
fn presets_are_those_of_the_contract() {
    let shape = |name: &str| {
        let c = load(Sources::default().preset(name));
        let m = &c.model;
        let numbers = [
            m.layers,
            m.width,
            m.heads,
            m.kv_heads,
            m.ffn,
            m.vocab,
            c.train.seq_len,
            c.train.batch_size,
        ];
        (m.kind, numbers.map(Count::get), m.tied)
    };
    let llama = ModelKind::Llama;
    assert_eq!(shape("tiny"), (llama, [8, 64, 8, 4, 128, 509, 64, 32], false));
    assert_eq!(shape("bench-13m"), (llama, [6, 384, 6, 6, 1024, 8192, 256, 8], false));
    assert_eq!(
        shape("gpt2-124m"),
        (ModelKind::Gpt2, [12, 768, 12, 12, 3072, 50304, 1024, 32], true)
    );
    assert_eq!(shape("llama-0.95b"), (llama, [16, 2048, 16, 16, 5632, 32000, 4096, 4], false));
    let experts = |name: &str| {
        let m = load(Sources::default().preset(name)).model;
        let sizes = [m.experts, m.expert_ffn.get(), m.top_k.get(), m.moe_every.get()];
        (sizes, m.capacity.write())
    };
    assert_eq!(
        (shape("tiny-moe"), experts("tiny-moe")),
        (shape("tiny"), ([8, 64, 2, 1], "1.25".to_owned()))
    );
    assert_eq!(shape("bench-moe"), shape("bench-13m"));
    assert_eq!(experts("bench-moe"), ([8, 512, 2, 2], "0.0".to_owned()));
    let bench = load(Sources::default().preset("bench-13m"));
    assert_eq!(bench.optim.clip.0.map(|norm| norm.get()), Some(1.0));
    assert_eq!((bench.model.norm_eps.get(), bench.model.bias), (1e-5, false));
    assert_eq!(bench.precision.compute, FloatKind::F32);
}

#[test]
fn threads_share_the_cores_among_ranks() {
    let threads = |preset: &str, cores| {
        let sources = Sources::default().preset(preset).cores(Count::new(cores).unwrap());
        load(sources).run.threads.get()
    };
    assert_eq!([1, 2, 64].map(|cores| threads("tiny", cores)), [1, 2, 64]);
    // 8 ranks.
    assert_eq!([1, 2, 64].map(|cores| threads("default", cores)), [1, 1, 8]);
}

#[test]
fn a_model_folder_overrides_presets_and_contradicts_users() {
    let pinned = |sources: Sources| {
        sources.pin(
            "m/config.json",
            vec![
                ("model.layers", "3".into()),
                ("model.kind", "gpt2".into()),
                ("model.kv_heads", "4".into()),
                ("model.norm_eps", "1e-5".into()),
            ],
        )
    };
    assert_eq!(load(pinned(Sources::default())).model.layers.get(), 3);
    let agreeing = Sources::default().set("model.layers=3").set("model.norm_eps=0.00001");
    assert_eq!(load(pinned(agreeing)).model.norm_eps.get(), 1e-5);
    assert_eq!(
        refused(pinned(Sources::default().set("model.layers=5"))),
        "error: model.layers = 5 contradicts the model's 3 (--set, m/config.json)\n  model.from \
        sets the model's shape\n  usual fix: leave model.layers out"
    );
}

#[test]
fn zero_clip_means_no_clip() {
    assert_eq!(load(Sources::default().set("optim.clip=0")).optim.clip.0, None);
    assert!(phalanx_config::listing().contains("clip"));
}

/// A layout is one whole: who says a part of it says all of it.
#[test]
fn the_default_runs_ranks_are_its_own() {
    let ranks = |sources: Sources| load(sources).parallel.ranks().get();
    assert_eq!(ranks(Sources::default()), 8);
    assert_eq!(ranks(Sources::default().set("train.steps=3")), 8);
    assert_eq!(ranks(Sources::default().set("parallel.dp=4")), 4);
    assert_eq!(ranks(Sources::default().set("parallel.zero=1")), 1);
    assert_eq!(ranks(Sources::default().preset("default").set("parallel.dp=4")), 16);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.toml");
    for (text, expected) in [("[train]\nsteps = 3\n", 1), ("preset = \"default\"\n", 8)] {
        std::fs::write(&path, text).unwrap();
        assert_eq!(ranks(Sources::default().file(&path)), expected, "{text}");
    }
}

/// A preset's schedule suits its own pipeline, and what comes out can be read as a file again.
#[test]
fn a_presets_pipeline_yields_to_a_user_who_has_none() {
    let dir = tempfile::tempdir().unwrap();
    let name = |config: &Config| config.parallel.schedule.write();
    let preset = Sources::default().preset("default");
    assert_eq!(name(&load(preset.clone())), "\"zb-h1\"");
    let one = load(preset.clone().set("parallel.pp=1"));
    assert_eq!((name(&one).as_str(), one.parallel.pp.get()), ("\"1f1b\"", 1));
    let kept = load(preset.set("parallel.pp=1").set("parallel.schedule=gpipe"));
    assert_eq!(name(&kept), "\"gpipe\"", "what the user writes holds");
    // A run's chunks and warm-up suit its own schedule.
    let run = dir.path().join("run.toml");
    std::fs::write(
        &run,
        "[model]\nlayers = 6\n[parallel]\npp = 2\nschedule = \"breadth-first\"\nchunks = 3\n",
    )
    .unwrap();
    let run = Sources::default().run(&run);
    assert_eq!(load(run.clone()).parallel.chunks.get(), 3);
    let other = load(run.set("parallel.schedule=csv:own.csv"));
    assert_eq!((other.parallel.chunks.get(), other.parallel.pp.get()), (1, 2));
    for config in [one, kept, other] {
        assert_eq!(load(Sources::default().file(file(&dir, &config.to_toml()))), config);
    }
}

/// Every named schedule takes one stage: the contract's small preset runs with any of them.
#[test]
fn one_stage_takes_any_named_schedule() {
    // Two directions need two stages.
    let both = ["chimera", "dualpipe"];
    let words = phalanx_config::PipelineSchedule::words().iter();
    for word in words.filter(|word| !both.contains(*word)) {
        let sources = Sources::default().preset("tiny").set("train.microbatches=4");
        let config = load(sources.set(format!("parallel.schedule={word}")));
        assert_eq!(config.parallel.schedule.write(), format!("\"{word}\""));
    }
}

fn notes(sources: Sources) -> Vec<String> {
    Config::load(&sources).unwrap().notes
}

/// What a user's settings take away from a preset is said, in one line.
#[test]
fn nothing_of_a_preset_is_dropped_silently() {
    assert_eq!(notes(Sources::default()), [""; 0]);
    assert_eq!(notes(Sources::default().set("train.steps=3")), [""; 0]);
    let layout = "parallel.dp = 2, parallel.pp = 2, parallel.schedule = \"zb-h1\", parallel.tp = 2, \
                  parallel.zero = 3, train.microbatches = 4 (--preset default keeps it)";
    for set in ["model.layers=3", "parallel.dp=4"] {
        let said = notes(Sources::default().set(set));
        let cause = set.replace('=', " = ");
        let expected = format!("with {cause}, the layout of preset default is not used: {layout}");
        let expected = match set {
            "parallel.dp=4" => expected.replace("parallel.dp = 2, ", ""),
            _ => expected,
        };
        assert_eq!(said, [expected]);
        assert_eq!(notes(Sources::default().preset("default").set("train.seq_len=64")), [""; 0]);
    }
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, "[train]\nsteps = 7\n");
    let said = notes(Sources::default().file(&path));
    let cause = format!("with {}, the layout of preset default is not used: ", path.display());
    assert!(said.len() == 1 && said[0].starts_with(&cause), "{said:?}");
    // A preset that was asked for keeps its ranks, but a pipeline's settings need a pipeline.
    let said = notes(Sources::default().preset("default").set("parallel.pp=1"));
    assert_eq!(
        said,
        ["with parallel.pp = 1, the layout of preset default is not used: parallel.schedule = \
          \"zb-h1\" (set it too to keep it)"]
    );
}

#[test]
fn a_shortened_sequence_and_a_high_learning_rate_are_noted() {
    let short = notes(Sources::default().preset("tiny").set("model.context=32"));
    assert_eq!(short, ["train.seq_len = 32, the model's context, instead of 64"]);
    let from = Sources::default().preset("tiny").set("model.from=hf:weights");
    let said = notes(from.clone());
    assert!(said.len() == 1 && said[0].contains("--set optim.lr=1e-5"), "{said:?}");
    assert_eq!(notes(from.set("optim.lr=3e-3")), [""; 0]);
}

/// A preset's constants are those of its own optimizer; the user's are refused where they have no use.
#[test]
fn an_optimizer_without_betas_takes_none_of_a_preset() {
    let from = Sources::default().preset("bench-13m").set("optim.kind=adafactor");
    let said = notes(from.clone());
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(
        said[0].contains("optim.betas = [0.9, 0.999] of preset bench-13m has no use"),
        "{said:?}"
    );
    let betas = Config::load(&from).unwrap().config.optim.betas;
    assert_eq!(betas.map(|beta| beta.get()), [0.0, 0.0]);
    assert!(Config::load(&from.set("optim.betas=[0.9, 0.99]")).is_err());
    assert_eq!(notes(Sources::default().preset("bench-13m").set("optim.kind=lion")), [""; 0]);
}

/// A setting that nothing reads is accepted with a note, because degrees of 1 are among those that are tried. In each row, the
/// first settings leave the last one without effect, and the word says why; with the second settings there is
/// something that reads it.
#[test]
fn a_setting_without_effect_is_noted() {
    let rows = [
        ("", "parallel.tp=2", "parallel.sp=true", "parallel.tp = 1"),
        ("", "parallel.tp=4", "parallel.tp_kind=2d", "parallel.tp = 1"),
        ("", "parallel.cp=2", "parallel.cp_kind=ring", "parallel.cp = 1"),
        (
            "parallel.cp_kind=ring",
            "parallel.cp_kind=ring parallel.cp=2",
            "parallel.cp_order=striped",
            "parallel.cp = 1",
        ),
        ("", "parallel.dp=2", "parallel.zero=3", "parallel.dp = 1 and parallel.cp = 1"),
        ("", "parallel.cp=2", "parallel.fsdp=true", "parallel.dp = 1 and parallel.cp = 1"),
        (
            "parallel.dp=4",
            "parallel.dp=4 parallel.zero=1",
            "parallel.dp_shard=2",
            "parallel.zero = 0",
        ),
        (
            "parallel.dp=2 parallel.zero=1",
            "parallel.dp=2",
            "parallel.bucket_mib=1",
            "parallel.zero = 1",
        ),
        (
            "parallel.dp=2 parallel.sync=average",
            "parallel.dp=2",
            "parallel.bucket_mib=1",
            "parallel.sync = \"average\"",
        ),
        (
            "parallel.dp=2",
            "parallel.dp=2 parallel.zero=2",
            "parallel.reduce_bucket_size=9",
            "parallel.zero = 0",
        ),
        (
            "parallel.zero=2",
            "parallel.zero=2 parallel.cp=2",
            "parallel.allgather_bucket_size=9",
            "parallel.dp = 1",
        ),
        ("optim.kind=sgd", "optim.kind=adam", "optim.betas=[0.5,0.6]", "optim.kind = \"sgd\""),
        ("optim.kind=lion", "optim.kind=lamb", "optim.eps=0.5", "optim.kind = \"lion\""),
        ("", "optim.schedule=linear", "optim.min_lr_ratio=0.5", "optim.schedule = \"constant\""),
        ("", "data.kind=text data.path=a", "data.val_fraction=0.5", "data.kind = \"synthetic\""),
        ("", "data.kind=tokens data.path=a", "data.dtype=u16", "data.kind = \"synthetic\""),
        ("", "run.checkpoint_minutes=5", "run.keep=9", "run.checkpoint_every = 0"),
    ];
    for (idle, used, setting, why) in rows {
        let notes = |sets: &str| {
            let sets = sets.split_whitespace().filter(|set| set.contains('=')).chain([setting]);
            let tiny = Sources::default().preset("tiny");
            Config::load(&sets.fold(tiny, |sources, set| sources.set(set))).unwrap().notes
        };
        let (key, _) = setting.split_once('=').unwrap();
        let told = |notes: &[String]| notes.iter().find(|note| note.starts_with(key)).cloned();
        let note = told(&notes(idle)).unwrap_or_else(|| panic!("{setting} with {idle}"));
        assert!(note.contains(&format!(" has no effect with {why}")), "{note}");
        assert_eq!(told(&notes(used)), None, "{setting} with {used}");
    }
    // A run's own file has every key, and none of its values is a surprise.
    let dir = tempfile::tempdir().unwrap();
    let text = load(Sources::default().preset("tiny")).to_toml();
    let loaded = Config::load(&Sources::default().file(file(&dir, &text))).unwrap();
    assert_eq!(loaded.notes, Vec::<String>::new());
}
