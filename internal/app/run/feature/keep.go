package feature

import (
	"context"
	"log/slog"
	"time"

	"dlrover-run/internal/retry"
)

// healthy is how long a helper runs until its earlier ends are forgotten.
const healthy = 10 * time.Minute

// Keep keeps a helper of the job running until ctx ends: once runs it, and returns why it has ended. After the last of
// the pauses it is left ended.
func Keep(
	ctx context.Context, log *slog.Logger, name string, pauses []time.Duration, once func(context.Context) string,
) {
	for i := 0; ; i++ {
		began := time.Now()
		why := once(ctx)
		if time.Since(began) > healthy {
			i = 0
		}
		if ctx.Err() != nil {
			return
		}
		if i == len(pauses) {
			log.Warn(name+" has ended again, and is not started any more; the job goes on", "why", why)
			return
		}
		log.Warn(name+" has ended; it is started again", "why", why, "in", pauses[i].String())
		if !retry.Sleep(ctx, pauses[i]) {
			return
		}
	}
}
