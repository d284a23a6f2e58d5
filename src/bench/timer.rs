//! Time on the device: timestamps where they work, else the wall clock from submission until the queue is done.

use std::time::Instant;

use crate::error::{Error, Result};
use crate::gpu::Gpu;

/// What a time was taken with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(serde::Serialize))]
#[cfg_attr(feature = "cli", serde(rename_all = "kebab-case"))]
pub enum Clock {
    /// Timestamps of the device around the commands.
    Timestamps,
    /// The host's clock, from the submission until the queue is done.
    WallClock,
}

/// One timed submission.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reading {
    /// Seconds by the host's clock, from the submission until the queue was done.
    pub wall: f64,
    /// The device's timestamps before and after, in ticks.
    pub ticks: Option<[u64; 2]>,
}

/// Seconds of all readings, the clock that they are of, and why it is not the device's where there were timestamps.
#[derive(Debug, Clone, PartialEq)]
pub struct Settled {
    /// Seconds, one a reading.
    pub seconds: Vec<f64>,
    /// Their clock: one for all.
    pub clock: Clock,
    /// Why timestamps were not believed; empty where they were, and where there are none.
    pub note: String,
}

/// Timestamps may say this much more than the wall clock around them before they are not believed.
const SLACK: f64 = 1.05;

/// Chooses the clock of some readings: timestamps if all of them go forward and fit into the wall clock's time around
/// them, else the wall clock for all. `period` is nanoseconds a tick. Seconds are finite and above 0.
pub fn settle(readings: &[Reading], period: f32) -> Settled {
    let wall = |note: &str| Settled {
        // A clock that stands still is no infinite speed either.
        seconds: readings.iter().map(|reading| reading.wall.max(1e-9)).collect(),
        clock: Clock::WallClock,
        note: note.to_owned(),
    };
    let mut seconds = Vec::new();
    for reading in readings {
        let Some([before, after]) = reading.ticks else {
            return wall("");
        };
        if before == 0 || after <= before {
            return wall("the device's timestamps do not go forward: wall clock");
        }
        let time = (after - before) as f64 * f64::from(period) * 1e-9;
        // Written so that a NaN is not believed.
        if !(time > 0.0 && time <= reading.wall * SLACK) {
            return wall("the device's timestamps do not fit into the time around them: wall clock");
        }
        seconds.push(time);
    }
    Settled {
        seconds,
        clock: Clock::Timestamps,
        note: String::new(),
    }
}

/// Times of the same work again and again.
#[derive(Debug, Clone, PartialEq)]
pub struct Samples {
    /// Seconds of the work once, one a sample, in the order in which they were taken.
    pub seconds: Vec<f64>,
    /// Their clock.
    pub clock: Clock,
    /// Why timestamps were not believed; else empty.
    pub note: String,
    /// How often one submission does the work.
    pub repeats: u32,
    /// Wall seconds of the warm-up, with what it compiles; in no sample.
    pub warm_up: f64,
}

impl Samples {
    /// The lower quartile, the median and the upper quartile, in seconds.
    pub fn quartiles(&self) -> [f64; 3] {
        quartiles(&self.seconds)
    }
}

/// The lower quartile, the median and the upper quartile, between neighbours in proportion. NaN of nothing.
pub fn quartiles(values: &[f64]) -> [f64; 3] {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    [0.25, 0.5, 0.75].map(|share| {
        let Some(last) = sorted.len().checked_sub(1) else {
            return f64::NAN;
        };
        let at = share * last as f64;
        let (below, above) = (sorted[at as usize], sorted[(at as usize + 1).min(last)]);
        below + (above - below) * at.fract()
    })
}

/// The fewest samples.
pub const LEAST_SAMPLES: usize = 5;
/// The most samples: enough for any spread.
const MOST_SAMPLES: usize = 1000;
/// Submissions before the first sample.
pub const WARM_UPS: u32 = 2;
/// Wall seconds that one submission lasts at least, by repeating the work in it: submitting is small beside it.
const LEAST_SUBMISSION: f64 = 0.005;
/// The most repeats in one submission.
const MOST_REPEATS: f64 = 256.0;

#[derive(Debug)]
struct Stamps {
    set: wgpu::QuerySet,
    resolved: wgpu::Buffer,
}

/// Times what is recorded on one device.
#[derive(Debug)]
pub struct Timer {
    gpu: Gpu,
    stamps: Option<Stamps>,
}

impl Timer {
    /// With timestamps where the device was opened with [`crate::gpu::TIMESTAMPS`].
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn new(gpu: &Gpu) -> Result<Timer> {
        let device = gpu.device();
        let stamps = device.features().contains(crate::gpu::TIMESTAMPS).then(|| {
            gpu.checked("making timestamps", || Stamps {
                set: device.create_query_set(&wgpu::QuerySetDescriptor {
                    label: Some("timestamps"),
                    ty: wgpu::QueryType::Timestamp,
                    count: 2,
                }),
                resolved: device.create_buffer(&wgpu::BufferDescriptor {
                    label: Some("timestamps"),
                    size: 16,
                    usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
                    mapped_at_creation: false,
                }),
            })
        });
        Ok(Timer {
            gpu: gpu.clone(),
            stamps: stamps.transpose()?,
        })
    }

    /// The clock that is tried first.
    pub fn clock(&self) -> Clock {
        match self.stamps {
            Some(_) => Clock::Timestamps,
            None => Clock::WallClock,
        }
    }

    /// Records, submits, and waits until the queue is done.
    ///
    /// # Errors
    /// What `record` returns, and [`Error::Device`].
    pub fn read(&self, record: impl FnOnce(&mut wgpu::CommandEncoder) -> Result<()>) -> Result<Reading> {
        let during = "a timed submission";
        let wait = || {
            let polled = self.gpu.device().poll(wgpu::PollType::wait_indefinitely());
            polled.map(|_| ()).map_err(|e| Error::Device {
                during: during.to_owned(),
                message: e.to_string(),
            })
        };
        let wall = self.gpu.checked(during, || {
            let mut encoder = self.gpu.device().create_command_encoder(&Default::default());
            if let Some(stamps) = &self.stamps {
                encoder.write_timestamp(&stamps.set, 0);
            }
            record(&mut encoder)?;
            if let Some(stamps) = &self.stamps {
                encoder.write_timestamp(&stamps.set, 1);
                encoder.resolve_query_set(&stamps.set, 0..2, &stamps.resolved, 0);
            }
            let commands = encoder.finish();
            // Uploads that were waiting for a submission are none of the work.
            self.gpu.queue().submit([]);
            wait()?;
            let started = Instant::now();
            self.gpu.queue().submit([commands]);
            wait()?;
            Ok(started.elapsed().as_secs_f64())
        })??;
        let ticks = match &self.stamps {
            None => None,
            Some(stamps) => {
                let words = self.gpu.read_back("timestamps", &[(&stamps.resolved, 0..16)])?;
                let words = self.gpu.block_on(words)?;
                let tick = |at: usize| u64::from(words[at]) | u64::from(words[at + 1]) << 32;
                Some([tick(0), tick(2)])
            }
        };
        Ok(Reading { wall, ticks })
    }

    /// Warms up, then takes samples for about so many seconds, at least [`LEAST_SAMPLES`]. `record` records the work once.
    ///
    /// # Errors
    /// As [`Timer::read`].
    pub fn sample(
        &self,
        seconds: f64,
        record: &mut dyn FnMut(&mut wgpu::CommandEncoder) -> Result<()>,
    ) -> Result<Samples> {
        let started = Instant::now();
        let mut once = f64::MAX;
        for _ in 0..WARM_UPS {
            once = once.min(self.read(&mut *record)?.wall);
        }
        let warm_up = started.elapsed().as_secs_f64();
        let repeats = (LEAST_SUBMISSION / once.max(1e-9))
            .ceil()
            .clamp(1.0, MOST_REPEATS) as u32;
        let started = Instant::now();
        let mut readings = Vec::new();
        while readings.len() < LEAST_SAMPLES
            || (started.elapsed().as_secs_f64() < seconds && readings.len() < MOST_SAMPLES)
        {
            readings.push(self.read(|encoder| (0..repeats).try_for_each(|_| record(encoder)))?);
        }
        let settled = settle(&readings, self.gpu.queue().get_timestamp_period());
        Ok(Samples {
            seconds: settled.seconds.iter().map(|s| s / f64::from(repeats)).collect(),
            clock: settled.clock,
            note: settled.note,
            repeats,
            warm_up,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(wall: f64, ticks: [u64; 2]) -> Reading {
        Reading {
            wall,
            ticks: Some(ticks),
        }
    }

    #[test]
    fn ben_07_timestamps_that_do_not_go_forward_fall_back_to_the_wall_clock() {
        let good = reading(2e-3, [1_000_000, 2_000_000]);
        let settled = settle(&[good, good], 1.0);
        assert_eq!((settled.clock, settled.note.as_str()), (Clock::Timestamps, ""));
        assert!(settled.seconds.iter().all(|&s| (s - 1e-3).abs() < 1e-12));
        let forward = "do not go forward";
        for (bad, period, said) in [
            (reading(2e-3, [0, 0]), 1.0, forward),
            (reading(2e-3, [5, 5]), 1.0, forward),
            (reading(2e-3, [9, 5]), 1.0, forward),
            (reading(2e-3, [0, 5]), 1.0, forward),
            (reading(2e-3, [1, u64::MAX]), 1.0, "do not fit"),
            (reading(2e-3, [1, 1000]), 0.0, "do not fit"),
            (reading(2e-3, [1, 1000]), f32::NAN, "do not fit"),
        ] {
            // One is enough: no figure mixes two clocks.
            let settled = settle(&[good, bad], period);
            assert_eq!(settled.clock, Clock::WallClock);
            assert!(
                settled.note.contains(said) && settled.note.contains("wall clock"),
                "{settled:?}"
            );
            assert_eq!(settled.seconds, [2e-3, 2e-3]);
        }
        let none = Reading {
            wall: 0.0,
            ticks: None,
        };
        let settled = settle(&[none], 1.0);
        assert!(settled.note.is_empty() && settled.seconds.iter().all(|s| *s > 0.0 && (1.0 / s).is_finite()));
    }

    #[test]
    fn quartiles_lie_between_neighbours() {
        assert_eq!(quartiles(&[3.0, 1.0, 2.0, 5.0, 4.0]), [2.0, 3.0, 4.0]);
        assert_eq!(quartiles(&[1.0, 2.0]), [1.25, 1.5, 1.75]);
        assert_eq!(quartiles(&[7.0]), [7.0; 3]);
        assert!(quartiles(&[]).iter().all(|q| q.is_nan()));
    }
}
