#include "program_driver.hpp"

#include "sparse_kvcm/error.hpp"

namespace sparse_kvcm::testing {
namespace {

constexpr std::int32_t kMostLive = 4;

const char* const kSituationNames[] = {"commit",
                                       "commit of several units",
                                       "step without growth",
                                       "row left out of record_read",
                                       "abort",
                                       "abort before wait_ready",
                                       "abort after resolve",
                                       "abort after a partial write",
                                       "hit",
                                       "miss",
                                       "window read",
                                       "window read below the watermark",
                                       "all-window lease",
                                       "duplicate",
                                       "ordinal out of range",
                                       "padding row",
                                       "invalid row",
                                       "stale: step closed",
                                       "stale: twice",
                                       "past need",
                                       "past window",
                                       "past new units",
                                       "late flush",
                                       "resume refused",
                                       "re-lease",
                                       "suspend with units in the window",
                                       "suspend refused in a step",
                                       "suspend without host pages",
                                       "import",
                                       "import while active",
                                       "import without host pages",
                                       "close in a step",
                                       "remove in a step",
                                       "add in a step",
                                       "move to another batch",
                                       "batch closed in a step",
                                       "refused call",
                                       "several launches per group",
                                       "outputs of the caller",
                                       "failed publish",
                                       "failed call"};
static_assert(std::size(kSituationNames) == static_cast<std::size_t>(Situation::kCount));

}  // namespace

const char* name_of(Situation situation) {
  return kSituationNames[static_cast<std::size_t>(situation)];
}

void ProgramCounts::add(const ProgramCounts& other) {
  for (std::size_t i = 0; i < seen.size(); ++i) seen[i] += other.seen[i];
  sabotaged += other.sabotaged;
}

Program::Program(const ProgramOptions& options)
    : options_(options),
      random_(options.seed),
      manager_(make_manager(random_config(random_), backend_)),
      model_(manager_->config()),
      bytes_(*manager_),
      fresh_occupancy_(numbers(manager_->occupancy())),
      leased_(model_.leased_pages()),
      owned_(model_.owned_host_pages()),
      once_leased_(leased_) {
  poison_what_is_free();
}

ProgramResult Program::run() {
  ProgramResult result;
  try {
    play();
  } catch (const Mismatch& mismatch) {
    result.failure = mismatch.what();
  } catch (const std::exception& error) {
    result.failure = std::string("unexpected exception: ") + error.what();
  }
  result.trace = trace_.str();
  return result;
}

void Program::play() {
  make_batch();
  if (random_.percent(60)) make_batch();
  admit();
  admit();
  const std::int32_t operations = random_.percent(1) ? 500 : random_.between(30, 60);
  for (std::int32_t n = 0; n < operations; ++n) one_operation();
  check_everything();
  close_everything();
}

void Program::one_operation() {
  const std::int32_t b = pick_batch();
  const std::int32_t dice = random_.below(100);
  if (dice < 25) return advance(b);
  if (dice < 58) return finish_step(b);
  if (dice < 61) return num_live() < kMostLive ? admit() : check_everything();
  if (dice < 64) return misuse(b);
  if (dice < 66) return take_errors(b);
  if (dice < 68) return close_batch(b);
  if (dice < 71) return check_everything();
  const std::int32_t i = pick_request();
  if (i == kNobody) return admit();
  if (dice < 75) return import_history(i);
  if (dice < 80) return resume(i);
  if (dice < 85) return suspend(i);
  if (dice < 88) return close_request(i);
  if (dice < 96) return add(b, i);
  remove(b, i);
}

// Calls of a step without regard to whether one is open.
void Program::misuse(std::int32_t b) {
  switch (random_.below(6)) {
    case 0:
      return publish(b);
    case 1:
      return wait_ready(b);
    case 2:
      return resize(b);
    case 3:
      return record_badly(b);
    case 4:
      return abort_step(b);
    default:
      return next_of_launches(b);
  }
}

std::int32_t Program::pick_request() {
  std::vector<std::int32_t> candidates;
  for (std::int32_t i = 0; i < num_requests(); ++i) {
    const bool closed = model_.request(i).state == KvCacheState::kClosed;
    if (caches_[at(i)] != nullptr && (!closed || random_.percent(10))) candidates.push_back(i);
  }
  return candidates.empty() ? kNobody : random_.pick(candidates);
}

std::int32_t Program::pick_batch() {
  std::vector<std::int32_t> candidates;
  for (std::int32_t b = 0; b < model_.num_batches(); ++b)
    if (batches_[at(b)] != nullptr && (!model_.batch(b).closed || random_.percent(3)))
      candidates.push_back(b);
  if (!candidates.empty()) return random_.pick(candidates);
  make_batch();
  return model_.num_batches() - 1;
}

std::int32_t Program::num_live() const {
  std::int32_t live = 0;
  for (const KvCachePtr& cache : caches_)
    live += cache != nullptr && cache->state() != KvCacheState::kClosed ? 1 : 0;
  return live;
}

Snapshot Program::snapshot() const {
  std::vector<KvCachePtr> caches;
  std::vector<BatchPtr> batches;
  for (const KvCachePtr& cache : caches_)
    if (cache != nullptr) caches.push_back(cache);
  for (std::int32_t b = 0; b < model_.num_batches(); ++b)
    if (!model_.batch(b).closed) batches.push_back(batches_[at(b)]);
  return take_snapshot(*manager_, caches, batches, WithBytes::kNo);
}

Refusals Program::thrown_by(const std::function<void()>& call, std::string& message) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    message = error.what();
    return kArgument;
  } catch (const InvalidState& error) {
    message = error.what();
    return kState;
  } catch (const OutOfPages& error) {
    message = error.what();
    return kPages;
  }
  return kNone;
}

Program::Outcome Program::outcome_of(const char* what, Refusals refusals,
                                     const std::function<void()>& call) {
  std::optional<Snapshot> before;
  if (refusals != kNone) before = snapshot();
  std::string message;
  Refusals thrown = kNone;
  try {
    thrown = thrown_by(call, message);
  } catch (const DeviceFault&) {
    trace("  the device fails");
    backend_->settle();
    return Outcome::kFailed;
  }
  backend_->settle();
  const auto fail = [&](const std::string& how) {
    throw Mismatch(std::string(what) + " " + how + (message.empty() ? "" : ": " + message));
  };
  if (refusals == kNone && thrown == kNone) return Outcome::kAccepted;
  if (refusals == kNone) fail("was refused");
  if (thrown == kNone) fail("was not refused");
  if ((thrown & refusals) == 0) fail("threw the wrong exception");
  const std::string difference = first_difference(*before, snapshot());
  if (!difference.empty()) fail("was refused and changed " + difference);
  count(Situation::kRefused);
  return Outcome::kRefused;
}

bool Program::accepted_at_last(const char* what, Refusals refusals,
                               const std::function<void()>& call) {
  if (refusals != kNone || !random_.percent(3)) return accepted(what, refusals, call);
  const auto without_entries = [&] {
    Snapshot s = snapshot();
    for (RequestView& view : s.requests) view.entries.clear();
    return s;
  };
  const Snapshot before = without_entries();
  backend_->fail_after(random_.below(6));
  const Outcome outcome = outcome_of(what, refusals, call);
  backend_->withdraw();
  if (outcome != Outcome::kFailed) return outcome == Outcome::kAccepted;
  count(Situation::kFailedCall);
  const std::string difference = first_difference(before, without_entries());
  if (!difference.empty()) throw Mismatch(std::string(what) + " failed and changed " + difference);
  poison_what_is_free();
  return accepted(what, refusals, call);
}

}  // namespace sparse_kvcm::testing
