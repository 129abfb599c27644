//! What the library refuses: typed, with its own words, before anything starts.

use phalanx::{
    Builder, Chain, DType, Data, Ddp, Init, Megatron, Mistake, Mlp, Model, Optimizer, SpmdError,
    Table, Trainer, Zero,
};

fn table() -> Table {
    Table::new(4).input("x", vec![-2.0, -1.0, 1.0, 2.0]).target("y", vec![4.0, 1.0, 1.0, 4.0])
}

fn trainer() -> Trainer<'static> {
    Trainer::new(Mlp::regression(1, [8], 1)).data(table()).batch(4).steps(2).threads(1)
}

/// The mistake behind a refusal; its text has a remedy, and no key of the command's.
fn mistake(trainer: Trainer<'_>) -> Mistake {
    let error = trainer.run().unwrap_err();
    let text = error.to_string();
    assert_eq!(error.exit_code(), 2, "{text}");
    assert_eq!(text, format!("{error:?}"), "main prints the same");
    assert!(text.contains("usual fix: "), "{text}");
    for section in ["train.", "optim.", "parallel.", "run.", "model.", "data."] {
        let own = text.split_whitespace().any(|word| word.starts_with(section));
        assert!(!own, "{text} names a key of the command");
    }
    let source = std::error::Error::source(&error).expect("a refusal has a source");
    assert!(source.downcast_ref::<Mistake>().is_some(), "{text}");
    error.cause::<Mistake>().expect("a typed cause").clone()
}

#[test]
fn numbers_without_sense_are_refused() {
    for lr in [-1.0, f64::NAN, f64::INFINITY] {
        assert!(matches!(mistake(trainer().lr(lr)), Mistake::LearningRate { step: 1, .. }));
    }
    // A schedule that goes below zero is refused before its first step.
    let falling = trainer().rate(|step| 1.5 - step as f64);
    assert_eq!(mistake(falling), Mistake::LearningRate { step: 2, lr: -0.5 });
    for clip in [-1.0, 0.0, f64::NAN, f64::INFINITY] {
        assert!(matches!(mistake(trainer().clip(Some(clip))), Mistake::Clip { .. }));
    }
    let adam = |beta1, beta2, eps, decay| Optimizer::AdamW { beta1, beta2, eps, decay };
    for (optimizer, name) in [
        (adam(2.0, 0.9, 1e-8, 0.0), "beta1"),
        (adam(0.9, 1.0, 1e-8, 0.0), "beta2"),
        (adam(0.9, 0.9, 0.0, 0.0), "eps"),
        (adam(0.9, 0.9, 1e-8, -1.0), "decay"),
        (Optimizer::sgd(-0.1), "momentum"),
    ] {
        let told = mistake(trainer().optimizer(optimizer));
        assert!(matches!(told, Mistake::Optimizer { name: own, .. } if own == name), "{told:?}");
    }
    assert_eq!(mistake(trainer().evaluate_every(0, table())), Mistake::EvaluateEveryZero);
}

#[test]
fn meshes_and_strategies_must_name_the_same_axes() {
    let told = mistake(trainer().mesh("dp=2").strategy(Megatron::default()));
    assert!(matches!(told, Mistake::NoAxis { axis, .. } if axis == "tp"));
    let told = mistake(trainer().mesh("pd=2").strategy(Ddp::default()));
    assert!(matches!(told, Mistake::NoAxis { axis, .. } if axis == "dp"));
    assert!(matches!(mistake(trainer().strategy(Ddp::default())), Mistake::NoAxis { .. }));
    let told = mistake(trainer().mesh("dp=2 tp=2").strategy(Ddp::default()));
    assert_eq!(told, Mistake::UnusedAxis { axis: "tp".into(), size: 2 });
    assert!(matches!(mistake(trainer().mesh("dp=2")), Mistake::UnusedAxis { .. }));
    // An axis of one rank needs no strategy.
    trainer().mesh("dp=2 tp=1").strategy(Ddp::default()).run().unwrap();

    let error = trainer().mesh("dp=2").strategy(Zero::stage(7)).run().unwrap_err();
    assert!(matches!(error.cause(), Some(SpmdError::ZeroStage { stage: 7 })), "{error}");
    assert!(error.to_string().contains("nearest that work: 1"), "{error}");
}

#[test]
fn tables_must_fit_the_model() {
    let with = |data: Table| mistake(trainer().data(data));
    let x = || vec![0.0; 4];
    let base = || Table::new(4).input("x", x());
    assert_eq!(with(table().input("x", x())), Mistake::ColumnTwice { name: "x".into() });
    assert!(matches!(with(base().target("y", vec![0.0; 3])), Mistake::Ragged { found: 3, .. }));
    assert!(matches!(with(base().target("z", x())), Mistake::NoColumn { port, .. } if port == "y"));
    assert_eq!(with(base().input("y", x())), Mistake::NoTarget);
    let told = with(base().labels("y", vec![0; 4]));
    assert!(matches!(told, Mistake::ColumnType { expected: DType::F32, .. }), "{told:?}");
    let told = with(base().target("y", vec![0.0; 8]));
    assert_eq!(told, Mistake::ColumnWidth { name: "y".into(), found: 2, expected: 1 });
    // The remedy for floats as classes names the method that takes classes.
    let floats = Trainer::new(Mlp::classifier(1, [8], 3)).data(table()).batch(4).run();
    assert!(floats.unwrap_err().to_string().contains("Table::labels"));
    assert!(matches!(Data::from(&table()), Data::Table(_)));
    let classes = Table::new(4).input("x", x()).labels("y", vec![0, 2, 3, -1]);
    let told = mistake(Trainer::new(Mlp::classifier(1, [8], 3)).data(classes).batch(4));
    assert_eq!(told, Mistake::OutOfRange { name: "y".into(), sample: 2, value: 3, end: 3 });
}

fn without_loss() -> Model {
    let b = Builder::new("half", DType::F32);
    let x = b.data("x", DType::F32, [4, 1]);
    b.probe("out", x.matmul(b.param("w", [1, 1])));
    let mut chain = Chain::new("half");
    chain.once(b, |_| Init::Normal(1.0)).unwrap();
    chain.finish()
}

#[test]
fn a_model_needs_a_loss_and_a_training_needs_data() {
    let told = mistake(Trainer::of_model(without_loss()).data(table()));
    assert_eq!(told, Mistake::NoLoss { model: "half".into() });
    assert_eq!(mistake(Trainer::new(Mlp::regression(1, [8], 1))), Mistake::NoData);
    let mut training = Trainer::new(Mlp::regression(1, [8], 1)).batch(4).build().unwrap();
    assert_eq!(training.fit(1).unwrap_err().cause(), Some(&Mistake::NoData));
    let told = training.export("nowhere", DType::F32).unwrap_err();
    assert!(matches!(told.cause(), Some(Mistake::NotExportable { .. })), "{told}");
    let told = training.set_param("layers.0.bias", &[0.0]).unwrap_err();
    assert!(matches!(told.cause(), Some(Mistake::ParamSize { found: 1, .. })), "{told}");
    let told = training.param("bias").unwrap_err();
    assert!(told.to_string().contains("one of layers.0.weight"), "{told}");
}

#[test]
fn memory_is_told_in_the_words_of_the_library() {
    let told = trainer().memory_limit(100).run().unwrap_err().to_string();
    assert!(told.contains("Trainer::memory_limit allows 100 bytes"), "{told}");
    assert!(told.contains("Trainer::microbatches") && !told.contains("train."), "{told}");
}
