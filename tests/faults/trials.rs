//! Launches with something on trial: what a candidate cannot do is done with the default.

use std::time::Duration;

use claystone::tune::{self, Level};

use crate::driver::{DEVICE, on_device};
use crate::stand_in::{self, Faults, Kind};

#[test]
fn a_candidate_that_fails_is_no_error() {
    let Some(faults) = Faults::here() else {
        // Without a cache, which would keep what was chosen for the next time this runs.
        let no_cache = [("CLAYSTONE_CACHE_DIR", "off")];
        let test = "trials::a_candidate_that_fails_is_no_error";
        let ended = stand_in::run(test, Kind::Real, &no_cache, Duration::from_secs(300));
        assert!(ended.text.contains("1 passed"), "{:?}: {}", ended.status, ended.text);
        return;
    };
    const REFUSED: i32 = -54; // CL_INVALID_WORK_GROUP_SIZE
    let t = on_device(&[0.0; 1000]);
    let one = on_device(&[1.0; 1000]);
    t.add_(&one).unwrap();
    let failing = |step: &dyn Fn()| {
        let errors = faults.errors("clEnqueueNDRangeKernel");
        faults.fail("clEnqueueNDRangeKernel", 1, 1, REFUSED);
        step();
        assert_eq!(faults.errors("clEnqueueNDRangeKernel"), errors + 1);
    };
    failing(&|| assert!(t.add_(&one).is_err()));

    tune::set_level(DEVICE, Level::Fast).unwrap();
    let mut added = 1;
    while tune::on_trial(DEVICE).unwrap() > 0 || added == 1 {
        failing(&|| _ = t.add_(&one).unwrap());
        added += 1;
    }
    assert!(added > 10 && t.to_vec::<f32>().unwrap() == [added as f32; 1000], "{added}");
    let chosen = tune::choices(DEVICE).unwrap();
    assert!(!chosen.is_empty());
    // One that never ran is not chosen: what was chosen is the default, which launches do without a second attempt.
    let launches = faults.calls("clEnqueueNDRangeKernel");
    t.add_(&one).unwrap();
    assert_eq!(faults.calls("clEnqueueNDRangeKernel"), launches + 1);
}
