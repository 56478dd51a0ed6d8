//! Launches that try a tuning candidate. If the candidate fails, the default must be launched instead.

use std::time::Duration;

use claystone::tune::{self, Level};

use crate::driver::{DEVICE, on_device};
use crate::stand_in::{self, Faults, Kind};

#[test]
fn failing_candidates_are_not_errors() {
    let Some(faults) = Faults::here() else {
        // The program cache is off, because it would store the choice for the next run of this test.
        let no_cache = [("CLAYSTONE_CACHE_DIR", "off")];
        let test = "trials::failing_candidates_are_not_errors";
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
    // A candidate that never ran must not be chosen. The choice is then the default, which needs a single launch.
    let launches = faults.calls("clEnqueueNDRangeKernel");
    t.add_(&one).unwrap();
    assert_eq!(faults.calls("clEnqueueNDRangeKernel"), launches + 1);
}
